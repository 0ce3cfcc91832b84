"""The suite for adapters: a loop that is recorded as it should be passes, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.errors import MissingPackageError
from sonde.testing import AdapterTests
from sonde.testing.by_hand import Net, Recipe

HINT = """
from sonde.errors import MissingPackageError
try:
    import planted_trainer
except ImportError as error:
    raise MissingPackageError("planted_trainer", "{extra}", "recording") from error
"""


class Recorder:
    """An adapter for the loop below."""

    def __init__(self, **options: Any) -> None:
        self.options, self.session = options, None
        self.is_own = sonde.session.active_session() is None

    def begin(self, net: nn.Module, optimizer: Any) -> None:
        self.session = sonde.init(**self.options) if self.is_own else sonde.session.active_session()
        self.session.watch(net, optimizer)

    def before_clipping(self, net: nn.Module) -> None: ...

    def before_step(self, net: nn.Module) -> None: ...

    def stepped(self, step: int, loss: float) -> None:
        self.session.log({"loss": loss})

    def end(self, error: BaseException | None) -> None:
        if self.is_own:
            self.session.__exit__(type(error), error, None)


def loop(net: Any, recipe: Recipe, recorder: Recorder | None) -> None:
    """A loop in the manner of those people write, which calls what records it."""
    optimizer = recipe.optimizer(net)
    recorder = recorder or Silent()
    recorder.begin(net, optimizer)
    error = None
    try:
        for step, batch in enumerate(recipe.rows().loader()):
            loss, _ = net(**batch)
            loss.backward()
            recorder.before_clipping(net)
            nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
            recorder.before_step(net)
            optimizer.step()
            optimizer.zero_grad()
            recorder.stepped(step, loss.item())
    except BaseException as caught:
        error = caught
        raise
    finally:
        recorder.end(error)


class Silent(Recorder):
    def begin(self, net, optimizer): ...

    def stepped(self, step, loss): ...

    def end(self, error): ...


class LoopTests(AdapterTests):
    module, package = "planted_adapter", "planted_trainer"
    made: Callable[..., Recorder] = Recorder

    def recorder(self, **options: Any) -> Recorder:
        return self.made(**options)

    def train(self, net: Any, recorder: Any) -> list[float]:
        loop(net, self.recipe, recorder)
        return net.losses


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "planted_adapter.py").write_text(HINT.format(extra="transformers"))
    monkeypatch.syspath_prepend(folder)
    yield folder
    sonde.finish()


class TestLoop(LoopTests):
    pass


# ------------------------------------------------------------------------------------------------------ what must fail


class LeavesGradientsOut(Recorder):
    def begin(self, net, optimizer):
        self.session = sonde.init(**self.options)
        self.session.watch(net, optimizer, sites="first*")


class CountsFromOne(Recorder):
    def stepped(self, step, loss):
        self.session.log({"loss": loss}, step=step + 1)


class DrawsANumber(Recorder):
    def stepped(self, step, loss):
        super().stepped(step, loss)
        torch.rand(1)


class TouchesGradients(Recorder):
    def before_step(self, net):
        net.first.weight.grad.mul_(1 + 1e-6)


class LeavesAHook(Recorder):
    def begin(self, net, optimizer):
        super().begin(net, optimizer)
        net.first.register_forward_hook(lambda *_: None)


class AlwaysEndsWell(Recorder):
    def end(self, error):
        super().end(None)


class StaysOpen(Recorder):
    def end(self, error): ...


class EndsTheUsers(Recorder):
    def end(self, error):
        self.session.finish()


def suite(recorder: type[Recorder]) -> Any:
    return type("Broken", (LoopTests,), {"made": recorder})()


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (LeavesGradientsOut, "test_gradients_are_those_of_a_loop_by_hand"),
        (TouchesGradients, "test_gradients_are_those_of_a_loop_by_hand"),
        (CountsFromOne, "test_the_loss_is_at_the_step_it_is_of"),
        (StaysOpen, "test_a_training_that_ends_well_is_finished"),
        (LeavesAHook, "test_no_hook_is_left"),
    ],
)
def test_a_fault_in_what_is_recorded_is_found(tmp_path, fault, test):
    broken = suite(fault)
    broken.rtol = 1e-7
    with pytest.raises(AssertionError):
        getattr(broken, test)(broken._outcome(tmp_path))


@pytest.mark.parametrize("fault", [DrawsANumber, TouchesGradients])
def test_a_training_that_is_changed_is_found(tmp_path, fault):
    broken = suite(fault)
    plain = broken._outcome(tmp_path, is_recorded=False)
    with pytest.raises(AssertionError):
        broken.test_no_bit_of_the_training_changes(plain, broken._outcome(tmp_path))


@pytest.mark.parametrize("fault", [AlwaysEndsWell, StaysOpen])
@pytest.mark.parametrize(
    "test", ["test_an_exception_ends_the_run_as_crashed", "test_an_interrupt_ends_the_run_as_interrupted"]
)
def test_a_run_that_ends_wrongly_is_found(tmp_path, fault, test):
    with pytest.raises(AssertionError):
        getattr(suite(fault), test)(tmp_path)


def test_a_users_session_that_is_ended_is_found(tmp_path):
    with pytest.raises(AssertionError):
        suite(EndsTheUsers).test_a_session_of_the_user_is_used_and_left_open(tmp_path)


@pytest.mark.parametrize("content", ["", HINT.format(extra="no-such-extra")])
def test_a_missing_hint_is_found(planted, monkeypatch, content):
    (planted / "planted_adapter.py").write_text(content)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        LoopTests().test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch)


def test_the_net_fails_on_request():
    net = Net(MissingPackageError("a", "b", "c"))
    with pytest.raises(MissingPackageError):
        loop(net, Recipe(), None)
    assert len(net.losses) == 3
