"""Loops that log the number of the step they are in: what was recorded is right where value and step are equal."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

STEPS: Final = 6


def net() -> nn.Sequential:
    """A model with one output."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def batch(rows: int = 2) -> Tensor:
    return torch.randn(rows, 3)


def check_steps(run: Any, *names: str, steps: int = STEPS, each: int = 1) -> None:
    """Each of these values is the number of its step, and there is one, or `each`, of every step."""
    for name in names:
        table = run.scalars(name)
        assert table["value"].to_pylist() == table["step"].to_pylist(), name
        assert table["step"].to_pylist() == sorted([*range(steps)] * each), name


def check_count(run: Any, steps: int = STEPS, site: str = "2.bias") -> None:
    """The expected number of steps were made, each with a gradient, and nothing failed."""
    assert run.last_step == steps - 1
    assert run.stats(f"grad/{site}/n")["step"].to_pylist() == list(range(steps))
    assert run.warnings == []


def rows_seen(run: Any, site: str = "2") -> list[int]:
    """Rows that went through a layer with one output, step by step."""
    return [int(n) for n in run.stats(f"act/{site}/n")["value"].to_pylist()]
