"""The beginning of each training forward pass of the watched model, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.probe.entry import EntryTap
from sonde.probe.model import ModelNames


@pytest.fixture
def entries():
    taps = []

    def follow(model: nn.Module) -> list[str]:
        seen: list[str] = []
        taps.append(EntryTap(ModelNames(model), lambda: seen.append("entered"), lambda *args: seen.append("failed")))
        return seen

    yield follow
    for tap in taps:
        tap.detach()


def test_once_for_each_training_pass(entries):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    seen = entries(model)
    model(torch.randn(1, 2))
    model[0](torch.randn(1, 2))
    nn.Linear(2, 2)(torch.randn(1, 2))
    with torch.no_grad():
        model(torch.randn(1, 2))
    assert seen == ["entered"]


def test_not_while_the_compiler_traces(entries):
    model = nn.Linear(2, 2)
    seen = entries(model)
    torch.compiler.reset()
    torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(torch.randn(1, 2))
    torch.compiler.reset()
    assert seen == []


def test_nothing_after_detach():
    model = nn.Linear(2, 2)
    seen: list[str] = []
    tap = EntryTap(ModelNames(model), lambda: seen.append("entered"), lambda *args: None)
    tap.detach()
    model(torch.randn(1, 2))
    assert seen == []


def test_a_failure_of_ours_stays_ours():
    model = nn.Linear(2, 2)
    errors: list[str] = []

    def fail() -> None:
        raise RuntimeError("ours")

    tap = EntryTap(ModelNames(model), fail, lambda where, error: errors.append(str(error)))
    assert model(torch.randn(1, 2)).shape == (1, 2)
    tap.detach()
    assert errors == ["ours"]
