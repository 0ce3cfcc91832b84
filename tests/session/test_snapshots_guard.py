"""A tensor that is written to while it is copied is never kept as it was half-way; proved by removing the guard."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sonde
from sonde.session.snapshots import copies as copying
from sonde.session.snapshots.copies import Copier

SIZE = 70_000


class Writes(nn.Module):
    """Waits in its forward pass until the first copy is done, then writes to its own parameter: a careless model."""

    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self.write, self.is_copied = write, threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        assert self.is_copied.wait(10)
        self.write(self.weight)
        return (x * self.weight.mean()).sum()


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight += 1.0


def replaced(weight: nn.Parameter) -> None:
    weight.data = torch.ones(SIZE)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """Events to set whenever the copying thread has done a piece of work."""
    events: list[threading.Event] = []
    put = Copier.put

    def tell(self: Copier, job: Callable[[], None]) -> None:
        def then_tell() -> None:
            job()
            for event in events:
                event.set()

        put(self, then_tell)

    monkeypatch.setattr(Copier, "put", tell)
    return events


def train(model: Writes, begin: Any, **options: Any) -> Any:
    session = begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    session.watch(model, optimizer, snapshots=sonde.Snapshots(store="memory", when=sonde.every(1), **options))
    model(torch.ones(3)).backward()
    found = model.weight.detach().clone()
    optimizer.step()
    assert session.flush(30)
    return session.steps.snapshots._writer._store.read(0).tensors["param/weight"].values(), found.numpy()


@pytest.mark.parametrize("write", [in_place, replaced])
def test_a_parameter_written_to_after_it_was_copied_is_copied_again(
    write: Any, begin: Any, copied: list[threading.Event]
) -> None:
    model = Writes(write)
    copied.append(model.is_copied)
    kept, found = train(model, begin)
    assert np.array_equal(kept, found)
    assert kept[0] == 1.0


@pytest.mark.parametrize("write", [in_place, replaced])
def test_without_the_guard_the_old_values_would_be_kept(
    write: Any, begin: Any, copied: list[threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "mark", lambda tensor: (0, 0))
    model = Writes(write)
    copied.append(model.is_copied)
    kept, found = train(model, begin)
    assert not np.array_equal(kept, found), "the test above cannot fail"


def test_copied_at_once_nothing_needs_to_be_found_out(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "mark", lambda tensor: (0, 0))
    model = Writes(in_place)
    model.is_copied.set()
    kept, found = train(model, begin, at_once=True)
    assert np.array_equal(kept, found)


class Slow:
    """Lets the copying thread begin only on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go, put = threading.Event(), Copier.put

        def wait(copier: Copier, job: Callable[[], None]) -> None:
            put(copier, lambda: (self.may_go.wait(30), job())[1])

        monkeypatch.setattr(Copier, "put", wait)


def linear(begin: Any, **settings: Any) -> tuple[nn.Linear, torch.optim.Optimizer, Any]:
    model, session = nn.Linear(300, 300), begin(**settings)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), session


def test_a_thread_that_never_comes_to_copying_costs_no_snapshot(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine: what is not copied when the optimizer steps is copied there and then."""
    monkeypatch.setattr(copying, "_PART_BYTES", 50_000)
    slow = Slow(monkeypatch)
    model, optimizer, session = linear(begin)
    session.watch(model, optimizer, snapshots=sonde.Snapshots(store="memory", when=sonde.every(1)))
    seen = []
    for _ in range(3):
        model(torch.randn(2, 300)).sum().backward()
        seen.append({name: value.numpy().copy() for name, value in model.state_dict().items()})
        optimizer.step()
    assert session.flush(30)
    store = session.steps.snapshots._writer._store
    for step, expected in enumerate(seen):
        for name, value in expected.items():
            assert np.array_equal(store.read(step).tensors[f"param/{name}"].values(), value)
    slow.may_go.set()
    assert session.steps.snapshots.ledger.counts == {"taken": 3, "skipped": 0, "failed": 0}
    assert session.steps.snapshots._memory().used_bytes == 0


def test_a_thread_stopped_in_the_middle_of_a_part_costs_the_snapshot_and_not_the_step(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may continue to write when the parameters have changed: nothing that it holds can be kept."""
    may_go, begun, copy = threading.Event(), threading.Event(), copying._copy_small

    def stopped(pairs: Any) -> None:
        if threading.current_thread().name == "sonde-copies":
            begun.set()
            may_go.wait(30)
        copy(pairs)

    monkeypatch.setattr(copying, "_STUCK_S", 0.05)
    monkeypatch.setattr(copying, "_copy_small", stopped)
    model, session = nn.Linear(3, 3), begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.watch(model, optimizer, snapshots=sonde.Snapshots(store="memory", when=sonde.every(1)))
    y = model(torch.ones(2, 3)).sum()
    assert begun.wait(30)
    y.backward()
    optimizer.step()
    assert session.steps.snapshots.ledger.counts == {"taken": 0, "skipped": 1, "failed": 0}
    may_go.set()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert session.flush(30)
    assert session.steps.snapshots.ledger.counts == {"taken": 1, "skipped": 1, "failed": 0}
    assert session.steps.snapshots._memory().used_bytes == 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_zeroed_before_they_are_copied_are_taken_again_and_then_at_once(
    set_to_none: bool, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `set_to_none` nothing writes to them: they are only let go, and we hold them."""
    slow = Slow(monkeypatch)
    model, optimizer, session = linear(begin)
    session.watch(
        model, optimizer, snapshots=sonde.Snapshots(store="memory", when=lambda step: step == 2, kinds=("grad",))
    )
    grads: list[np.ndarray] = []
    for step in range(6):
        model(torch.randn(2, 300)).square().sum().backward()
        assert model.weight.grad is not None
        grads.append(model.weight.grad.numpy().copy())
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        if step >= 2:
            slow.may_go.set()
            assert session.flush(30)
    store = session.steps.snapshots._writer._store
    assert store.steps() == ([0, 2] if set_to_none else [3])
    for step in store.steps():
        assert np.array_equal(store.read(step).tensors["grad/weight"].values(), grads[step])
    assert session.steps.snapshots.ledger.counts["failed"] == 0
