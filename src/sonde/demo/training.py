"""A small training, and the loop that runs it while sonde watches: the loop that a user would write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from sonde.session import init, log

Batch = tuple[Tensor, Tensor]
NUM_CLASSES, NUM_FEATURES = 5, 20
Progress = Callable[[int, int, float], None]
"""Called after every step: step, number of steps, loss."""


@dataclass(slots=True, kw_only=True)
class Training:
    """A model, its optimizer and its data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    num_steps: int
    held_out: Batch | None = None
    """A batch for a validation loss, every 20 steps."""
    schedule: Callable[[int], float] | None = None
    """The learning rate of each step."""


def train(training: Training, *, name: str, dir: Path, config: dict[str, object], progress: Progress) -> Path:
    """Train to the end; return the folder of the run."""
    with init(project="demo", name=name, dir=dir, config=config, verbose=False) as session:
        session.watch(training.model, training.optimizer)
        for step in range(training.num_steps):
            if training.schedule is not None:
                for group in training.optimizer.param_groups:
                    group["lr"] = training.schedule(step)
            x, y = next(training.batches)
            loss = loss_of(training.model, x, y)
            training.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            training.optimizer.step()
            log({"loss": loss})
            if training.held_out is not None and step % 20 == 19:
                log({"val_loss": validate(training.model, training.held_out)})
            progress(step, training.num_steps, loss.item())
    return Path(str(session.path))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of every prediction; of a sequence, at every position."""
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def validate(model: nn.Module, batch: Batch) -> float:
    """The loss on a batch, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, *batch).item()
    model.train()
    return loss


def clusters(num_rows: int, *, spread: float = 1.0) -> Batch:
    """Rows of five classes that no straight line separates."""
    g = torch.Generator().manual_seed(7)
    centres = 1.6 * torch.randn(NUM_CLASSES, NUM_FEATURES, generator=g)
    bend = torch.randn(NUM_FEATURES, NUM_FEATURES, generator=g) / NUM_FEATURES**0.5
    y = torch.randint(NUM_CLASSES, (num_rows,), generator=g)
    x = centres[y] + spread * torch.randn(num_rows, NUM_FEATURES, generator=g)
    x = x + 0.3 * (x @ bend) ** 2
    return (x - x.mean(0)) / x.std(0), y


def batches(data: Batch, size: int = 64) -> Iterator[Batch]:
    """Shuffled batches, epoch after epoch."""
    x, y = data
    g = torch.Generator().manual_seed(1)
    while True:
        for rows in torch.split(torch.randperm(len(x), generator=g), size):
            if len(rows) == size:
                yield x[rows], y[rows]


def tokens(size: int = 16, length: int = 32, vocabulary: int = 24) -> Iterator[Batch]:
    """Sequences in which each token mostly decides the next one, and their continuations."""
    g = torch.Generator().manual_seed(1)
    follows = torch.randint(vocabulary, (vocabulary, 3), generator=g)
    while True:
        x = torch.randint(vocabulary, (size, length + 1), generator=g)
        for place in range(length):
            choice = torch.randint(3, (size,), generator=g)
            x[:, place + 1] = follows[x[:, place], choice]
        yield x[:, :-1], x[:, 1:]
