"""Our failures, anywhere, leave training bit-identical; they are reported once, and too many switch sonde off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar

import pytest
import torch

import sonde
from awkward import Case, train

SOURCE = str(Path(sonde.__file__).parent)
ROOMS = tuple(f"{SOURCE}/{room}/" for room in ("probe", "reduce", "budget", "session", "write", "schema"))
# The wrappers themselves, up to their `try`: nothing of ours runs there.
WRAPPERS = {
    ("guards.py", "run"),
    ("guards.py", "__exit__"),
    ("clip.py", "clip"),
    ("scaler.py", "step"),
    ("functions.py", "cross_entropy"),
    ("functions.py", "call"),
    ("functions.py", "backward"),
    ("functions.py", "call_untraced"),
    ("entry.py", "entered"),
    ("functional.py", "call"),
    ("compiled_steps.py", "begins"),
    ("compiled_steps.py", "ends"),
    ("hooks.py", "_pre"),
    ("hooks.py", "_post"),
    ("passes.py", "__call__"),  # a hook of one assignment
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
        # A generator that is thrown away half-read is called once more; what is raised there is never seen.
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
        # Whatever goes wrong while values of the user's are read counts as their failure, and is said as well.
        num_failed, num_errors = told.count("a measurement failed"), result["session"].recording.breaker.num_errors
        assert (told.count("warning:"), num_errors) == (1, num_failed), (injector.where, told)
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


NUM_STEPS = 6


def count_injected(at: int, begin: Any) -> tuple[Any, Injector]:
    """A loop that logs before and after the backward pass, and after an extra forward pass; each value is its step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = begin(hist_every=1)
    session.watch(model, optimizer, activations=sonde.every(1))
    injector = Injector(at)
    look: Any = None
    sys.setprofile(injector)
    try:
        for step in range(NUM_STEPS):
            injector.armed = step in (2, 3)
            loss = model(torch.randn(2, 3)).square().mean()
            session.log({"before": step})
            optimizer.zero_grad()
            loss.backward()
            session.log({"between": step})
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            session.log({"after": step})
            look = model(torch.randn(5, 3))
            session.log({"look": step})
    finally:
        sys.setprofile(None)
    del look
    session.finish()
    return sonde.open(session.path), injector


def check_count(points: Any, begin: Any) -> None:
    for at in points:
        run, injector = count_injected(at, begin)
        if not injector.where:
            return
        where = f"{at}: {injector.where}"
        assert run.last_step == NUM_STEPS - 1, where
        for name in ("before", "between", "after", "look"):
            table = run.scalars(name)
            assert table["step"].to_pylist() == table["value"].to_pylist(), (where, name)
            assert table.num_rows >= NUM_STEPS - 1, (where, name)  # the call that failed may be lost, and no other
        for series in ("grad/1.bias/n", "update/1.bias/n", "act/1/n"):
            table = run.stats(series)
            steps = table["step"].to_pylist()
            assert len(steps) == len(set(steps)) >= NUM_STEPS - 1, (where, series)
            later = [value for step, value in zip(steps, table["value"].to_pylist(), strict=True) if step > 4]
            assert later == [2.0 if series.startswith("act") else 1.0], (where, series)
        assert run.warnings, where


def test_a_step_counts_whatever_fails_inside_of_sonde(begin: Any) -> None:
    check_count(range(1, 1200, 61), begin)


@pytest.mark.fault
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", range(2))
def test_a_step_counts_wherever_in_sonde_something_fails(part: int, begin: Any) -> None:
    check_count(range(1 + part, 100_000, 2), begin)


def test_the_injector_hits_the_hooks(begin: Any) -> None:
    _, injector = train_injected(10**9, begin)
    assert injector.count > 500


NO_FILES = """
import resource, sys
import torch, sonde

torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = sonde.init(project="test", dir=sys.argv[1], verbose=False)
session.watch(model, optimizer)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for step in range(130):
    if step in (3, 120):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3 if step == 3 else limits[0], limits[1]))
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).square().mean()
    session.log({"before": step})
    loss.backward()
    optimizer.step()
    session.log({"after": step})
sonde.finish()
"""


@pytest.mark.fault
def test_a_process_that_can_open_no_file_counts_its_steps_and_says_so(tmp_path: Path) -> None:
    """Readings of memory fail then, and so does the disk, for a while."""
    done = subprocess.run([sys.executable, "-c", NO_FILES, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    run = sonde.open("latest", dir=tmp_path)
    assert (run.last_step, run.verify()) == (129, [])
    for name in ("before", "after"):
        table = run.scalars(name)
        assert table["step"].to_pylist() == table["value"].to_pylist() == list(range(130))
    assert run.stats("grad/weight/n")["step"].to_pylist() == list(range(130))
    assert [w for w in run.warnings if "Too many open files" in w]


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
    assert session.recording.breaker.is_open
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

    monkeypatch.setattr(session.steps.training.steps, "begin_next", broken)
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
