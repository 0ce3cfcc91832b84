"""A value that stops being finite is named: step, micro-batch, module, and whether it came with the data."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.reduce.inspect.finite import FiniteFlags
from sonde.session.observers import nonfinite
from sonde.session.observers.nonfinite import Look, nonfinite_event


class Planted(nn.Module):
    """A layer that spoils its output in one call."""

    def __init__(self, call: int, value: float = math.nan) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.call, self.value, self.calls = call, value, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.inner(x)
        return y * self.value if self.calls - 1 == self.call else y


class Between(nn.Module):
    """Takes a logarithm between two modules, of a negative number once."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.call, self.calls = call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.a(x).abs() + 1.0
        y: Tensor = self.b(torch.log(h - 1e6 if self.calls - 1 == self.call else h))
        return y


def train(model: nn.Module, *, steps: int, micro_batches: int = 1, bad_input: int = -1) -> list[dict[str, Any]]:
    """Events of a run; the session is the defaults'."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sonde.init(project="nonfinite", verbose=False).watch(model, optimizer)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            x = torch.randn(3, 4, generator=generator)
            if step == bad_input:
                x[0, 0] = math.nan
            model(x).square().mean().backward()
        optimizer.step()
    sonde.finish()
    rows = sonde.open(session.path).events().to_pylist()
    return [{**row, **json.loads(row["details"])} for row in rows if row["type"] == "nonfinite"]


@pytest.mark.parametrize("step", [0, 7, 137])
def test_the_module_the_step_and_the_micro_batch_are_named(step: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Planted(2 * step + 1), nn.Linear(8, 2))
    first = train(model, steps=step + 2, micro_batches=2)[0]
    assert (first["step"], first["site"], first["role"], first["micro_batch"]) == (step, "2", "output", 1)
    assert not first["came_with_data"]
    assert first["after"] == "2.inner"


def test_a_value_that_came_with_the_data_is_told_from_one_that_was_made() -> None:
    first = train(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), steps=5, bad_input=3)[0]
    assert (first["step"], first["site"], first["role"]) == (3, "0", "input")
    assert first["came_with_data"]


def test_an_operation_between_two_modules_is_placed_between_them() -> None:
    first = train(Between(4), steps=6)[0]
    assert (first["step"], first["site"], first["role"], first["after"]) == (4, "b", "input", "a")
    assert not first["came_with_data"]


def test_a_loop_that_never_steps_is_told_while_it_runs(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of those who leave out every batch whose loss is not finite: no step is ever over."""
    monkeypatch.setattr(nonfinite, "MAX_HELD", 12)
    model = nn.Sequential(nn.Linear(4, 4), Planted(call=5))
    model[1].inner = nn.Linear(4, 4)
    session = begin().watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(20):
        model(torch.randn(3, 4))
        assert len(session.steps.models[0].nonfinite._flags) < 12
    session.flush()
    (event,) = [e for e in sonde.open(session.path).events().to_pylist() if e["type"] == "nonfinite"]
    details = json.loads(event["details"])
    assert (event["step"], details["site"], details["micro_batch"]) == (0, "1", 5)
    assert not details["came_with_data"]


def test_a_finite_run_has_no_event() -> None:
    assert train(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), steps=5) == []


def test_infinity_that_stays_inside_is_a_mask_and_no_fault() -> None:
    looks = [Look("mask", "output", 0, True, False, False), Look("model", "output", 0, False, True, False)]
    assert nonfinite_event(looks, [-math.inf, 1.0], 3, 0.0) is None
    assert nonfinite_event(looks, [-math.inf, math.inf], 3, 0.0) is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_element_is_enough_in_every_type(dtype: torch.dtype, bad: float) -> None:
    flags = FiniteFlags()
    good = torch.full((300, 300), 3.0).to(dtype)
    spoiled = good.clone()
    spoiled[17, 5] = bad
    flags.add("good", good, 0, in_part=False)
    flags.add("bad", spoiled, 0, in_part=False)
    taken = flags.take()
    assert taken is not None
    assert [math.isfinite(total) for total in taken[1].resolve()] == [True, False]


class Switched(nn.Module):
    """A layer of its own code behind another, spoiled through a buffer: a graph sees values, no Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.factor
        return y


@pytest.mark.slow
def test_inside_a_compiled_model_the_module_is_named_when_activations_are_taken_in_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Switched(), nn.ReLU(), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sonde.init(project="compiled", verbose=False).watch(model, optimizer, activations="in-graph")
    for step in range(30):
        model[2].factor.fill_(math.nan if step == 17 else 1.0)
        optimizer.zero_grad()
        loss = compiled(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        sonde.log({"loss": loss})
    sonde.finish()
    finding = next(f for f in sonde.open(session.path).findings() if f.rule == "nan_inf")
    assert (finding.step, finding.sites) == (17, ("2",))
