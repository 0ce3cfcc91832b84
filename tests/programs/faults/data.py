"""Small data sets made here: blobs, images of bars, regression, token sequences. Standardised by default."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from faults.program import Batch

Split = tuple[Batch, Batch]


def clusters(num: int = 1200, *, features: int = 20, classes: int = 5, spread: float = 1.0, seed: int = 7) -> Split:
    """Gaussian clusters bent by a random quadratic, so that a linear model does not solve them; 75 % for training."""
    g = torch.Generator().manual_seed(seed)
    centres = 1.6 * torch.randn(classes, features, generator=g)
    y = torch.randint(classes, (num,), generator=g)
    x = centres[y] + spread * torch.randn(num, features, generator=g)
    x = x + 0.3 * (x @ torch.randn(features, features, generator=g) / features**0.5) ** 2
    x = (x - x.mean(0)) / x.std(0)
    return _split(x, y)


def images(num: int = 1200, *, size: int = 8, noise: float = 0.6, seed: int = 8) -> Split:
    """Grey images (1, size, size) with a bar or a cross at a place that is the class: eight classes."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(8, (num,), generator=g)
    x = noise * torch.randn(num, 1, size, size, generator=g)
    shift = torch.randint(-1, 2, (num,), generator=g)
    for i in range(num):
        place = int(1 + 2 * (y[i] % 4) + shift[i]) % size
        if y[i] < 4:
            x[i, 0, place] += 2.0
        else:
            x[i, 0, :, place] += 2.0
    return _split((x - x.mean()) / x.std(), y)


def regression(num: int = 1000, *, features: int = 8, noise: float = 0.1, seed: int = 9) -> Split:
    """A smooth function of standardised features; targets (num, 1) standardised."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num, features, generator=g)
    w = torch.randn(features, 4, generator=g)
    y = torch.sin(x @ w[:, :2]).sum(1, keepdim=True) + 0.5 * (x @ w[:, 2:]).tanh().prod(1, keepdim=True)
    y = y + noise * torch.randn(num, 1, generator=g)
    return _split(x, (y - y.mean()) / y.std())


def slopes(num: int = 800, *, features: int = 6, seed: int = 10) -> Split:
    """A nearly linear function of standardised features, quick to learn; targets (num, 1) standardised."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num, features, generator=g)
    y = x @ torch.randn(features, 1, generator=g) / 2 + 0.3 * torch.sin(3 * x[:, :1])
    return _split(x, (y - y.mean()) / y.std())


@cache
def _chain(vocabulary: int, choices: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    p = torch.zeros(vocabulary, vocabulary)
    for i in range(vocabulary):
        next_tokens = torch.randperm(vocabulary, generator=g)[:choices]
        p[i, next_tokens] = torch.rand(choices, generator=g) + 0.2
    return p / p.sum(1, keepdim=True)


def language(
    seed: int = 0, *, batch: int = 32, length: int = 32, vocabulary: int = 24, choices: int = 4, pool: int = 64
) -> Iterator[Batch]:
    """Next-token batches from a sparse Markov chain; the best loss is its entropy, about ln(choices)."""
    p = _chain(vocabulary, choices)
    g = torch.Generator().manual_seed(5000 + seed)
    bank = []
    for _ in range(pool):
        tokens = torch.zeros(batch, length + 1, dtype=torch.long)
        tokens[:, 0] = torch.randint(vocabulary, (batch,), generator=g)
        for t in range(length):
            tokens[:, t + 1] = torch.multinomial(p[tokens[:, t]], 1, generator=g).squeeze(1)
        bank.append((tokens[:, :-1], tokens[:, 1:]))
    while True:
        yield from bank


def copying(seed: int = 0, *, batch: int = 32, half: int = 12, vocabulary: int = 16) -> Iterator[Batch]:
    """Sequences whose second half repeats the first: attention is needed. The first half is not scored (-100)."""
    g = torch.Generator().manual_seed(7000 + seed)
    while True:
        a = torch.randint(vocabulary, (batch, half), generator=g)
        tokens = torch.cat([a, a], 1)
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        y[:, : half - 1] = -100
        yield x, y


def recall(seed: int = 0, *, batch: int = 64, length: int = 40, classes: int = 4) -> Iterator[Batch]:
    """The class is shown at the first time step only; noise follows."""
    g = torch.Generator().manual_seed(8000 + seed)
    while True:
        y = torch.randint(classes, (batch,), generator=g)
        x = 0.3 * torch.randn(batch, length, classes, generator=g)
        x[torch.arange(batch), 0, y] += 2.0
        yield x, y


def _split(x: Tensor, y: Tensor) -> Split:
    k = int(0.75 * len(x))
    return (x[:k], y[:k]), (x[k:], y[k:])
