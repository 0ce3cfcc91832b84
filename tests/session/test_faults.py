"""Our failures, anywhere, leave training bit-identical; they are told once, and too many switch sonde off."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest
import torch

import sonde
from sonde.testing.awkward import Case, train

SOURCE = str(Path(sonde.__file__).parent)
ROOMS = tuple(f"{SOURCE}/{room}/" for room in ("probe", "reduce", "session", "record", "schema"))
# The wrappers themselves, up to their `try`: nothing of ours runs there.
WRAPPERS = {
    ("guards.py", "run"),
    ("guards.py", "__exit__"),
    ("clip.py", "clip"),
    ("functions.py", "cross_entropy"),
    ("functions.py", "call"),
    ("entry.py", "entered"),
    ("functional.py", "call"),
    ("session.py", "log"),
}
KEYS = ("losses", "model", "optimizer", "rng", "scale")


class InjectedError(RuntimeError):
    """What would happen if line k of ours were wrong."""


class Injector:
    """Raises at the k-th call of one of sonde's functions on this thread, once `armed`."""

    names: ClassVar[dict[CodeType, str]] = {}
    """Of every function that was called; empty where it is not one to fail."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.armed = at, 0, False
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.armed or self.where:
            return  # telling of a failure is not failed again
        name = self.names.get(frame.f_code)
        if name is None:
            name = self.names[frame.f_code] = self._name(frame.f_code)
        if not name:
            return
        self.count += 1
        if self.count == self.at:
            self.where = name
            raise InjectedError(self.where)

    @staticmethod
    def _name(code: CodeType) -> str:
        file, function = Path(code.co_filename).name, code.co_name
        # A generator that is thrown away half-read is called once more; what is raised there nobody sees.
        is_ours = code.co_filename.startswith(ROOMS) and (file, function) not in WRAPPERS and function != "<genexpr>"
        return f"{file}:{function}" if is_ours else ""


CASE = Case("reentrant", autocast=True, optimizer="adamw-fused", scaler=True, steps=2)


def train_injected(at: int, begin: Any) -> tuple[dict[str, Any], Injector]:
    injector = Injector(at)

    def watch(model: Any, optimizer: Any) -> Any:
        session = begin(hist_every=1)
        session.watch(model, optimizer, activations=sonde.every(1), activation_grads=sonde.every(1))
        injector.armed = True
        return session

    sys.setprofile(injector)
    try:
        result = train(CASE, watch)
    finally:
        sys.setprofile(None)
    return result, injector


def check_sweep(points: Any, begin: Any, capfd: Any) -> int:
    bare = train(CASE)
    for at in points:
        result, injector = train_injected(at, begin)
        assert {key: repr(result[key]) for key in KEYS} == {key: repr(bare[key]) for key in KEYS}, injector.where
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        told = capfd.readouterr().err
        if not injector.where:
            return at  # the run ended before the k-th call: every point has been tried
        assert result["session"].breaker.num_errors == 1, injector.where
        assert told.count("a measurement failed") == 1, injector.where
        result["session"].finish()
    return 0


@pytest.mark.fault
def test_an_exception_at_some_calls_leaves_training_bit_identical(begin: Any, capfd: Any) -> None:
    check_sweep(range(1, 4000, 131), begin, capfd)


@pytest.mark.fault
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(4))
def test_an_exception_at_each_call_of_a_step_leaves_training_bit_identical(part: int, begin: Any, capfd: Any) -> None:
    check_sweep([*range(1, 400), *range(400, 100_000, 31)][part::4], begin, capfd)


def test_the_injector_hits_the_hooks(begin: Any) -> None:
    _, injector = train_injected(10**9, begin)
    assert injector.count > 500


def test_too_many_failures_switch_sonde_off_and_are_recorded(
    begin: Any, reopen: Any, monkeypatch: Any, capfd: Any
) -> None:
    from sonde.reduce.torch import Reducer

    def broken(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(Reducer, "add", broken)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin(max_errors=3).watch(model, optimizer, activations=True)
    for _ in range(10):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert session.breaker.is_open
    told = capfd.readouterr().err
    assert told.count("a measurement failed") == 1
    assert told.count("switched off") == 1
    run = reopen()
    assert "switched_off" in run.events().column("type").to_pylist()
    assert run.stats("grad/weight/n").num_rows < 10


def test_a_failure_at_the_start_of_a_batch_is_not_raised(begin: Any, monkeypatch: Any, capfd: Any) -> None:
    session = begin()

    def broken() -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(session, "forward_seen", broken)
    session.batch(torch.ones(2))
    assert capfd.readouterr().err.count("planted") == 1


def test_keyboard_interrupt_passes_through_a_hook(begin: Any, monkeypatch: Any) -> None:
    from sonde.reduce.torch import Reducer

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reducer, "add", interrupted)
    model = torch.nn.Linear(2, 2)
    begin().watch(model, activations=True)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 2))
    assert torch.is_grad_enabled()
