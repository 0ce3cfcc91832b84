"""Programs whose numbers stop being numbers: in the data, in a module, only on the way back, or in the update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.data import clusters, regression
from faults.program import Batch, Job, endless, program

AFTER = ("lr_too_high", "exploding_gradients", "loss_spikes", "bad_batches", "unnormalised_inputs", "detached_graph")


class Logarithm(nn.Module):
    """log|x|, with a floor or without."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(functional.relu(x) + self.floor)


class Length(nn.Module):
    """The root of a sum of squares, appended: its slope at zero is infinite."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, (x.square().sum(1, keepdim=True) + self.floor).sqrt()], 1)


class Ratio(nn.Module):
    """Divides by the sum of positive parts, which may be nothing."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        positive = functional.relu(x)
        return positive / (positive.sum(1, keepdim=True) + self.floor)


class Softmax(nn.Module):
    """exp / sum of exp, with the largest taken away first or not."""

    def __init__(self, stable: bool) -> None:
        super().__init__()
        self.stable = stable

    def forward(self, x: Tensor) -> Tensor:
        x = 100 * x
        e = torch.exp(x - x.amax(1, keepdim=True) if self.stable else x)
        return e / e.sum(1, keepdim=True)


class Half(nn.Module):
    """Goes through float16 on the way: 65,504 is the end of its range."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * self.factor).square().float().mean(1, keepdim=True) - x


class Sick(nn.Module):
    """Hands its input on, times NaN from a call on: a fault planted at a known place and time."""

    def __init__(self, from_call: float) -> None:
        super().__init__()
        self.from_call, self.num_calls = from_call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        return x * math.nan if self.num_calls > self.from_call else x * 1.0


def _job(
    model: nn.Module, seed: int, *, batches: Iterator[Batch] | None = None, lr: float = 2e-3, steps: int = 200
) -> Job:
    (x, y), _ = clusters()
    optimizer = torch.optim.Adam(model.parameters(), lr)
    return Job(model, optimizer, functional.cross_entropy, batches or endless(x, y, 64, seed), steps)


def _net(*middle: nn.Module, width: int = 32, out: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), *middle, nn.Linear(out, 5))


@program("log_of_zero", "nan_inf", also_ok=AFTER, where="2", source="log without a floor")
def _(seed: int, fixed: bool) -> Job:
    return _job(_net(Logarithm(1.0 if fixed else 0.0)), seed)


@program("root_of_zero", "nan_inf", also_ok=AFTER, where="0", source="d sqrt(x)/dx at 0 is infinite; 0 * inf is NaN")
def _(seed: int, fixed: bool) -> Job:
    def with_zeros() -> Iterator[Batch]:
        (x, y), _ = clusters()
        for number, (rows, classes) in enumerate(endless(x, y, 64, seed)):
            if number == 60:
                rows = rows.clone()
                rows[3] = 0.0
            yield rows, classes

    model = nn.Sequential(nn.Linear(20, 16, bias=False), Length(1e-6 if fixed else 0.0), nn.Linear(17, 5))
    return _job(model, seed, batches=with_zeros())


@program("ratio_of_nothing", "nan_inf", also_ok=AFTER, where="1", source="0 / 0")
def _(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(nn.Linear(20, 5), Ratio(1e-3 if fixed else 0.0), nn.Linear(5, 5))
    return _job(model, seed)


@program("softmax_by_hand", "nan_inf", also_ok=AFTER, where="3", source="exp overflows: inf / inf")
def _(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), Softmax(stable=fixed), nn.Linear(16, 5))
    return _job(model, seed, lr=1e-2)


@program("half_overflows", "nan_inf", also_ok=AFTER, where="2", source="float16 ends at 65,504")
def _(seed: int, fixed: bool) -> Job:
    return _job(_net(Half(1.0 if fixed else 400.0)), seed, lr=5e-3)


@program("nan_in_the_data", "nan_inf", also_ok=AFTER, source="a missing value in one row")
def _(seed: int, fixed: bool) -> Job:
    (x, y), _ = clusters()
    if not fixed:
        x = x.clone()
        x[500, 7] = math.nan
    return _job(_net(), seed, batches=endless(x, y, 64, seed))


@program("nan_in_the_targets", "nan_inf", also_ok=(*AFTER, "unnormalised_targets"), source="a missing target")
def _(seed: int, fixed: bool) -> Job:
    (x, y), _ = regression()
    if not fixed:
        y = y.clone()
        y[300] = math.nan
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    return Job(model, torch.optim.Adam(model.parameters(), 1e-2), functional.mse_loss, endless(x, y, 50, seed), 300)


@program(
    "adam_without_epsilon",
    "nan_inf",
    also_ok=(*AFTER, "dead_relu", "adam_epsilon_dominates"),
    where="0.weight",
    source="0 / sqrt(0)",
)
def _(seed: int, fixed: bool) -> Job:
    (x, y), _ = clusters()
    x = torch.cat([x, torch.zeros(len(x), 2)], 1)  # two inputs that are always zero: so are their gradients
    model = nn.Sequential(nn.Linear(22, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, eps=1e-8 if fixed else 0.0)
    return Job(model, optimizer, functional.cross_entropy, endless(x, y, 64, seed), 120)


@program("planted_late", "nan_inf", also_ok=AFTER, where="2", source="a NaN at a known step in a known module")
def _(seed: int, fixed: bool) -> Job:
    return _job(_net(Sick(math.inf if fixed else 137)), seed)


@program("h_skipped_overflow", source="control: minus infinity in a mask is no fault")
def _(seed: int, fixed: bool) -> Job:
    return _job(_net(Masked()), seed)


class Masked(nn.Module):
    """A softmax over some of its inputs: the others are set to minus infinity, as masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.softmax = Mask(), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Any:
        return x + self.softmax(self.mask(x))


class Mask(nn.Module):
    """Minus infinity in every second place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(x.shape[1]) % 2 == 1, -math.inf)
