"""Data that is made here and can be learned in a few steps: no downloads, no two batches alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Batches = Iterator[tuple[Tensor, Tensor]]


def clusters(*, batch: int = 32, features: int = 12, classes: int = 4, seed: int = 0) -> Batches:
    """Gaussian clusters that overlap, one for each class."""
    centres = 0.7 * torch.randn(classes, features, generator=torch.Generator().manual_seed(99))
    made = torch.Generator().manual_seed(seed)
    while True:
        y = torch.randint(classes, (batch,), generator=made)
        yield centres[y] + torch.randn(batch, features, generator=made), y


def curves(*, batch: int = 32, features: int = 6, seed: int = 0) -> Batches:
    """A smooth function of normal features; targets (batch, 1) of unit scale."""
    weights = torch.randn(features, 1, generator=torch.Generator().manual_seed(98)) / features**0.5
    made = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(batch, features, generator=made)
        yield x, torch.sin(2 * x @ weights) + 0.5 * x @ weights


def pictures(*, batch: int = 16, size: int = 8, seed: int = 0) -> Batches:
    """Noisy grey pictures with a bar: its place is the class, of four."""
    made = torch.Generator().manual_seed(seed)
    while True:
        y = torch.randint(4, (batch,), generator=made)
        x = 0.5 * torch.randn(batch, 1, size, size, generator=made)
        x[torch.arange(batch), 0, 2 * y] += 2.0
        yield x, y


def sequences(*, batch: int = 16, length: int = 12, vocabulary: int = 20, seed: int = 0) -> Batches:
    """Tokens of a Markov chain with three successors each, and the tokens after them."""
    successors = torch.stack(
        [torch.randperm(vocabulary, generator=torch.Generator().manual_seed(token))[:3] for token in range(vocabulary)]
    )
    made = torch.Generator().manual_seed(seed)
    while True:
        tokens = [torch.randint(vocabulary, (batch,), generator=made)]
        for _ in range(length):
            choice = torch.randint(3, (batch,), generator=made)
            tokens.append(successors[tokens[-1], choice])
        made_tokens = torch.stack(tokens, 1)
        yield made_tokens[:, :-1], made_tokens[:, 1:]


def signals(*, batch: int = 16, length: int = 24, seed: int = 0) -> Batches:
    """Sine waves (batch, length, 1) of random phase and pitch, and each shifted by one."""
    made = torch.Generator().manual_seed(seed)
    time = torch.arange(length + 1)[None]
    while True:
        phase, pitch = 6.3 * torch.rand(2, batch, 1, generator=made)
        wave = torch.sin(phase + (0.2 + pitch / 10) * time)[..., None]
        yield wave[:, :-1], wave[:, 1:]
