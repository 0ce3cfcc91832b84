"""A value that stops being finite is named: step, micro-batch, module, and whether it came with the data."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import sonde
from sonde.reduce.inspect.finite import scan, send
from sonde.session.observers import nonfinite
from sonde.session.observers.nonfinite_event import Look, nonfinite_event


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


def nonfinite_events(run: Any) -> list[dict[str, Any]]:
    rows = run.events().to_pylist()
    return [{**row, **json.loads(row["details"])} for row in rows if row["type"] == "nonfinite"]


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
    return nonfinite_events(sonde.open(session.path))


@pytest.mark.parametrize("step", [0, 7, 137])
def test_the_module_the_step_and_the_micro_batch_are_named(step: int) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Planted(2 * step + 1), nn.Linear(8, 2))
    first = train(model, steps=step + 2, micro_batches=2)[0]
    assert (first["step"], first["site"], first["role"], first["micro_batch"]) == (step, "2", "output", 1)
    assert not first["came_with_data"]
    assert first["after"] == "2.inner"


def test_a_value_that_came_with_the_data_differs_from_a_computed_one() -> None:
    first = train(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), steps=5, bad_input=3)[0]
    assert (first["step"], first["site"], first["role"]) == (3, "0", "input")
    assert first["came_with_data"]


def test_an_operation_between_two_modules_is_placed_between_them() -> None:
    first = train(Between(4), steps=6)[0]
    assert (first["step"], first["site"], first["role"], first["after"]) == (4, "b", "input", "a")
    assert not first["came_with_data"]


def test_a_loop_that_never_steps_is_reported_while_it_runs(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of those who leave out every batch whose loss is not finite: no step is ever over."""
    monkeypatch.setattr(nonfinite, "MAX_HELD", 12)
    model = nn.Sequential(nn.Linear(4, 4), Planted(call=5))
    model[1].inner = nn.Linear(4, 4)
    session = begin().watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(20):
        model(torch.randn(3, 4))
        assert session.steps.models[0].nonfinite.num_held < 12
    session.flush()
    (event,) = [e for e in sonde.open(session.path).events().to_pylist() if e["type"] == "nonfinite"]
    details = json.loads(event["details"])
    assert (event["step"], details["site"], details["micro_batch"]) == (0, "1", 5)
    assert not details["came_with_data"]


def test_a_finite_run_has_no_event() -> None:
    assert train(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), steps=5) == []


def test_infinity_that_stays_inside_is_a_mask_and_no_fault() -> None:
    looks = [Look("mask", "output", 0, True, False), Look("model", "output", 0, False, True)]
    assert nonfinite_event([(looks, [math.inf, 0.0])], 3, 0.0) is None
    assert nonfinite_event([(looks, [math.inf, math.inf])], 3, 0.0) is not None


class Parts(nn.Module):
    """A model that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Planted(9)), nn.Linear(8, 2)


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_parts_that_are_called_separately_are_checked_before_backward(
    begin: Any, reopen: Any, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(nonfinite, "SMALL_BYTES", small)
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer)
    for _ in range(6):
        for _ in range(2):
            model.decoder(model.encoder(torch.randn(3, 4))).square().mean().backward()
        optimizer.step()
    first = nonfinite_events(reopen())[0]
    assert (first["step"], first["micro_batch"]) == (4, 1)
    assert "encoder.2" in (first["site"], *first["unknown"])
    assert small == 0 or (first["site"], first["after"]) == ("encoder.2", "encoder.2.inner")


def test_a_pass_that_fails_is_not_mixed_with_the_next(begin: Any, reopen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Planted(4)
            self.b.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, is_failing: bool) -> Tensor:
            y: Tensor = self.a(x)
            if is_failing:
                raise ValueError("bad batch")
            return self.b(y)

    model = Failing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer)
    for _ in range(6):
        with pytest.raises(ValueError, match="bad batch"):
            model(torch.randn(3, 4), True)
        model(torch.randn(3, 4), False).sum().backward()
        optimizer.step()
    assert session.recording.breaker.num_errors == 0
    first = nonfinite_events(reopen())[0]
    assert (first["step"], first["site"], first["after"], first["micro_batch"]) == (4, "b", "b.inner", 0)
    assert first["num_seen"] == 4  # the input, and the outputs of a, b.inner and b


@pytest.mark.parametrize("is_sampled", [True, False])
def test_an_output_that_is_read_in_part_is_checked_again_when_the_loss_is_known(
    begin: Any, reopen: Any, monkeypatch: pytest.MonkeyPatch, is_sampled: bool
) -> None:
    monkeypatch.setitem(nonfinite.END_BYTES, "cpu", 64 if is_sampled else 1 << 20)

    class Spoiled(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = 2 * x
            if self.calls == 3:
                y.data[12, 1] = math.nan  # step 2 reads rows 2, 34, ...
            return y

    model = nn.Sequential(nn.Linear(4, 8), Spoiled())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer)
    for _ in range(4):
        model(torch.randn(64, 4)).square().mean().backward()
        optimizer.step()
    first = nonfinite_events(reopen())[0]
    assert (first["step"], first["site"], first["role"], first["unknown"]) == (2, "1", "output", [])


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_a_tensor_that_was_overwritten_is_not_blamed(
    begin: Any, reopen: Any, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(nonfinite, "SMALL_BYTES", small)

    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = self.a(x)
            y: Tensor = self.b(h.mul_(math.nan if self.calls == 3 else 1.0))
            return y

    model = Overwriting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer)
    for _ in range(4):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    first = nonfinite_events(reopen())[0]
    assert (first["step"], first["site"], first["role"], first["unknown"]) == (2, "b", "input", ["a"])


@dataclasses.dataclass
class Result:
    """An output with tensors of many kinds."""

    values: Tensor
    index: Tensor
    more: Any


class Odd(nn.Module):
    """Returns a structure, with NaN in a tensor inside it."""

    calls = 0

    def forward(self, x: Tensor) -> Result:
        self.calls += 1
        deep = x * math.nan if self.calls == 3 else x * 1.0
        return Result(x + 1, x.argmax(-1), {"deep": (deep, None), "sparse": x.detach().to_sparse(), "one": x.sum()})


def test_structures_are_searched_and_odd_tensors_do_no_harm(begin: Any, reopen: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.odd, self.b = nn.Linear(4, 4), Odd(), nn.Linear(4, 2)

        def forward(self, x: Tensor, extra: Tensor) -> Tensor:
            found = self.odd(self.a(x))
            y: Tensor = self.b(found.values + found.more["deep"][0]) + extra.sum()
            return y

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer)
    with torch.inference_mode():
        extra = torch.randn(3)
    for _ in range(4):
        model(torch.randn(3, 4), extra).square().mean().backward()
        optimizer.step()
    assert session.recording.breaker.num_errors == 0
    first = nonfinite_events(reopen())[0]
    assert (first["step"], first["site"], first["role"], first["after"]) == (2, "odd", "output", "odd")


def test_no_activation_lives_longer_than_without_sonde(begin: Any) -> None:
    alive: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(not ref.expired() for ref in refs))
            y = x + 1
            refs.append(StorageWeakRef(y.untyped_storage()))
            return y

    refs: list[StorageWeakRef] = []
    model = nn.Sequential(nn.Linear(200, 200), *(Counting() for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer)
    model(torch.randn(100, 200)).sum().backward()
    assert max(alive) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_element_is_enough_in_every_type(dtype: torch.dtype, bad: float) -> None:
    good = torch.full((300, 300), 3.0).to(dtype)
    spoiled = good.clone()
    spoiled[17, 5] = bad
    assert scan([good, good.t()], [0], [1], 0) is None
    found = scan([good, None, spoiled, good.t()], [2], [], 0)
    assert found is not None
    states = send([found])()[0]
    assert states[:2] == [0.0, None]
    assert str(states[2:]) == str([bad, 0.0])


class Switched(nn.Module):
    """A layer of custom code after another, spoiled through a buffer: a graph sees values, no Python."""

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
