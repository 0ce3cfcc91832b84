"""Losses that jump: one huge spike, a sudden drop, a fall and a rise; and healthy ones that fall fast."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam

from faults import data
from faults.program import Batch, Job, Observer, endless, plain_step, program
from faults.stacks import mlp


def _slopes(seed: int, odd: int = -1) -> Iterator[Batch]:
    g = torch.Generator().manual_seed(90 + seed)
    w = torch.linspace(-1, 1, 8)[:, None]
    step = 0
    while True:
        x = torch.randn(32, 8, generator=g)
        yield x, x @ w + (60.0 if step == odd else 0.0)
        step += 1


@program("spike_once_but_huge", "loss_spikes", also_ok=("bad_batches",), source="once, 1,700 times")
def _spike(seed: int, fixed: bool) -> Job:
    model = mlp([8, 32, 1])
    return Job(model, Adam(model.parameters(), 3e-3), mse_loss, _slopes(seed, -1 if fixed else 200), 260)


def _logged_wrongly(job: Job, batch: Batch, observer: Observer, step: int) -> float:
    loss = plain_step(job, batch, observer, step)
    return loss / 40 if step >= 90 else loss


@program("drop_of_the_logged_loss", "loss_drop", source="LayerClaw: the logged mean is divided twice after a change")
def _drop(seed: int, fixed: bool) -> Job:
    (x, y), _ = data.clusters()
    model = mlp([20, 32, 5])
    step_fn = None if fixed else _logged_wrongly
    return Job(model, SGD(model.parameters(), 0.01), cross_entropy, endless(x, y, 50, seed), 180, step_fn=step_fn)


def _leaking(seed: int, since: int) -> Iterator[Batch]:
    """From a step on, the class is written into spare columns of the input, which a first layer already reads."""
    (x, y), _ = data.clusters()
    for step, (a, b) in enumerate(endless(x, y, 50, seed)):
        told = 8.0 * nn.functional.one_hot(b, 5) if 0 <= since <= step else torch.zeros(len(b), 5)
        yield torch.cat([a, told], 1), b


@program("drop_by_a_leak", "loss_drop", also_ok=("overfitting",), source="LayerClaw: the targets leak into the inputs")
def _leak(seed: int, fixed: bool) -> Job:
    model = nn.Linear(25, 5)
    with torch.no_grad():
        model.weight[:, 20:] = torch.eye(5)
    return Job(model, SGD(model.parameters(), 0.005), cross_entropy, _leaking(seed, -1 if fixed else 100), 160)


def _drifting(seed: int, since: int) -> Iterator[Batch]:
    """From a step on, the targets grow from batch to batch."""
    for step, (x, y) in enumerate(_slopes(seed)):
        yield x, y * (1.0 + 0.2 * max(step - since, 0) if since >= 0 else 1.0)


@program("fall_and_rise", "loss_divergence", also_ok=("unnormalised_targets",), source="8.9, then 0.7, then 20")
def _rise(seed: int, fixed: bool) -> Job:
    model = mlp([8, 16, 1])
    return Job(
        model, SGD(model.parameters(), 2e-2 if fixed else 3e-3), mse_loss, _drifting(seed, -1 if fixed else 80), 140
    )


class _Product(nn.Module):
    """A product of two small factors: a long plateau, then a fast fall."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.full((8,), 0.05)), nn.Parameter(torch.full((8,), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.first * self.second).sum(1, keepdim=True)


@program("h_plateau_then_fast_fall", source="saddles: the loss falls fast after a plateau, but over many steps")
def _plateau(seed: int, fixed: bool) -> Job:
    model = _Product()
    return Job(model, SGD(model.parameters(), 0.05), mse_loss, _slopes(seed), 300)
