"""The test suite for trainer adapters. To test a new one, write one class that says how it trains.

class TestMyTrainer(AdapterTests):
    module, package = "my_adapter", "my_trainer"

    def recorder(self, **options):
        return MyCallback(**options)

    def train(self, net, recorder):
        MyTrainer(net, callbacks=[recorder] if recorder else []).fit(self.recipe.rows())
        return net.losses
"""

from __future__ import annotations

import contextlib
import importlib
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from sonde.distribution import DISTRIBUTION, EXTRAS
from sonde.errors import MissingPackageError
from sonde.reduce.numpy import sketch
from sonde.run import Run, runs
from sonde.schema.stats import STATS
from sonde.session import active_session, finish, init
from sonde.testing.by_hand import (
    FAILS_AT,
    Gradients,
    Net,
    Recipe,
    digest,
    hooks_on,
    norms_before_clipping,
    train_by_hand,
)

COMPARED = ("norm", "mean", "std", "abs_mean", "max_abs", "zero_fraction")
"""Gradient stats that must equal those of the manual loop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one training; `run` if it was recorded."""

    losses: list[float]
    weights: str
    random_state: str
    run: Run | None = None
    hooks: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    """Before, and after."""


class TruthTests:
    """Checks that a trainer behaves the same with sonde as without, and that the recorded values equal those of a
    manual loop.

    For the training modes of an adapter: accumulation, precision. `AdapterTests` adds tests of the adapter itself.
    """

    recipe: ClassVar[Recipe] = Recipe()
    """How to train; the manual loop follows it."""
    loss_name: ClassVar[str] = "loss"
    """The trainer's name for the loss among the numbers it logs at every step."""
    prefix: ClassVar[str] = ""
    """The prefix of parameter names in the run, if a trainer wraps the net in another module."""
    rtol: ClassVar[float] = 1e-5

    def recorder(self, **options: Any) -> Any:
        """The adapter's callback or equivalent, with options of `sonde.init`."""
        raise NotImplementedError

    def train(self, net: Any, recorder: Any) -> list[float]:
        """Train a `Net` by `self.recipe`; without sonde if `recorder` is None. Returns the loss of every forward
        pass."""
        raise NotImplementedError

    def net(self, error: BaseException | None = None) -> nn.Module:
        """The net to train: the same each time. `error` is raised after three steps."""
        return Net(error)

    def by_hand(self) -> tuple[list[float], list[Gradients]]:
        """The loss and the gradients of every step, without sonde."""
        return train_by_hand(self.recipe)

    def raw_norms(self) -> list[dict[str, float]]:
        """The norm of every gradient before clipping, step by step; [] if the manual loop does not know it."""
        return norms_before_clipping(self.recipe)

    # ----------------------------------------------------------------------------------------------------- one training

    def _outcome(self, folder: Path, *, is_recorded: bool = True, error: BaseException | None = None) -> Outcome:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        net = self.net(error)
        before = hooks_on(net)
        on_interrupt = signal.getsignal(signal.SIGINT)
        with contextlib.chdir(folder):  # trainers write files to the working directory
            recorder = self.recorder(dir=folder / "runs", project="suite", verbose=False) if is_recorded else None
            losses = self._train(net, recorder, error)
            state = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
        signal.signal(signal.SIGINT, on_interrupt)  # and some ignore signals once they were interrupted
        found = runs(dir=folder / "runs")
        assert len(found) == is_recorded, f"expected one run for one training; found {len(found)}"
        return Outcome(
            losses, digest(net.state_dict()), digest(state), found[0] if found else None, (before, hooks_on(net))
        )

    def _train(self, net: Any, recorder: Any, error: BaseException | None) -> list[float]:
        if error is None:
            return self.recipe.losses(self.train(net, recorder))
        with pytest.raises((type(error), SystemExit)):  # some trainers return after an interrupt
            self.train(net, recorder)
        return []

    @pytest.fixture(autouse=True)
    def _no_session_left(self) -> Iterator[None]:
        yield
        finish()

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
        return cls()._outcome(tmp_path_factory.mktemp("plain"), is_recorded=False)

    @pytest.fixture(scope="class")
    @classmethod
    def recorded(cls, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
        return cls()._outcome(tmp_path_factory.mktemp("recorded"))

    # ------------------------------------------------------------------------------------------------------ correctness

    def test_gradients_are_those_of_a_loop_by_hand(self, recorded: Outcome) -> None:
        assert recorded.run is not None
        losses, gradients = self.by_hand()
        np.testing.assert_allclose(recorded.losses, losses, rtol=self.rtol, err_msg="this is a different training")
        gradients = [{self.prefix + name: grad for name, grad in step.items()} for step in gradients]
        table = recorded.run.stats([f"grad/*/{stat}" for stat in COMPARED]).to_pandas()
        assert sorted(set(table.site)) == sorted(gradients[0]), "the gradients of some parameters are missing"
        for (site, stat), rows in table.groupby(["site", "stat"]):
            rows = rows.sort_values("step")
            assert rows.step.tolist() == list(range(len(gradients))), f"{site}: steps are counted wrongly"
            wanted = [STATS[stat].of(made.rows, made.hist) for made in (sketch(step[site]) for step in gradients)]
            # A mean is a small difference of large numbers: its tolerance depends on their size.
            slack = self.rtol * max(float(np.abs(step[site]).max(initial=0.0)) for step in gradients)
            np.testing.assert_allclose(rows.value, wanted, rtol=self.rtol, atol=slack, err_msg=f"{site} {stat}")

    def test_norms_before_clipping_are_those_of_a_loop_by_hand(self, recorded: Outcome) -> None:
        wanted = self.raw_norms()
        if not wanted:
            pytest.skip("the manual loop has no norms before clipping")
        assert recorded.run is not None
        for name in wanted[0]:
            rows = recorded.run.stats(f"grad/{self.prefix}{name}/norm_preclip").to_pandas().sort_values("step")
            assert rows.step.tolist() == list(range(len(wanted))), f"{name}: steps are counted wrongly"
            np.testing.assert_allclose(rows.value, [step[name] for step in wanted], rtol=self.rtol, err_msg=name)
        totals = recorded.run.scalars("optim/grad_norm").to_pandas()
        assert totals.step.tolist() == list(range(len(wanted)))
        total = [np.linalg.norm(list(step.values())) for step in wanted]
        np.testing.assert_allclose(totals.value, total, rtol=self.rtol)

    def test_no_bit_of_the_training_changes(self, plain: Outcome, recorded: Outcome) -> None:
        assert recorded.losses == plain.losses
        assert recorded.weights == plain.weights
        assert recorded.random_state == plain.random_state

    def test_the_loss_is_at_the_step_it_is_of(self, recorded: Outcome) -> None:
        assert recorded.run is not None
        table = recorded.run.scalars(self.loss_name).to_pandas()
        assert table.step.tolist() == list(range(self.recipe.num_steps))
        np.testing.assert_allclose(table.value, recorded.losses, rtol=1e-4)  # some trainers round what they log

    def test_a_training_that_ends_well_is_finished(self, recorded: Outcome) -> None:
        assert recorded.run is not None
        assert recorded.run.status == "finished"
        assert recorded.run.last_step == self.recipe.num_steps - 1
        assert recorded.run.verify() == []


class AdapterTests(TruthTests):
    """Subclass it, name the adapter, and say how it trains."""

    module: ClassVar[str]
    """The module of the adapter."""
    package: ClassVar[str]
    """The package it is for, by its import name."""
    alternatives: ClassVar[tuple[str, ...]] = ()
    """Other packages that would also work."""

    def check_failed(self, folder: Path, error: BaseException, status: str) -> None:
        """A training that ends with this error has a run that says so, with everything recorded before it."""
        failed = self._outcome(folder, error=error)
        assert failed.run is not None
        assert failed.run.status == status
        assert active_session() is None, "the run is left open"
        norms = failed.run.stats("grad/*/norm")
        assert sorted(set(norms["step"].to_pylist())) == list(range(FAILS_AT // self.recipe.accumulate))
        assert failed.hooks[1] == failed.hooks[0]

    def test_an_exception_ends_the_run_as_crashed(self, tmp_path: Path) -> None:
        self.check_failed(tmp_path, RuntimeError("planted"), "crashed")

    def test_an_interrupt_ends_the_run_as_interrupted(self, tmp_path: Path) -> None:
        self.check_failed(tmp_path, KeyboardInterrupt(), "interrupted")

    def test_no_hook_is_left(self, recorded: Outcome) -> None:
        before, after = recorded.hooks
        assert after == before

    def test_a_session_of_the_user_is_used_and_left_open(self, tmp_path: Path) -> None:
        with contextlib.chdir(tmp_path), init(project="mine", dir=tmp_path / "runs", verbose=False) as session:
            self.train(self.net(), self.recorder())
            assert not session.is_finished
        (run,) = runs(dir=tmp_path / "runs")
        assert (run.project, run.last_step) == ("mine", self.recipe.num_steps - 1)

    def test_a_missing_package_is_named_with_the_line_that_installs_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check_hint(self.module, self.package, monkeypatch, alternatives=self.alternatives)


def check_hint(module: str, package: str, monkeypatch: pytest.MonkeyPatch, *, alternatives: Iterable[str] = ()) -> None:
    """Importing `module` without `package` and its alternatives says in one line how to install it."""
    hidden = (package, *alternatives)
    for name in (*hidden, *(name for name in sys.modules if name.partition(".")[0] in hidden)):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(MissingPackageError) as caught:
        importlib.import_module(module)
    hint = str(caught.value)
    assert "\n" not in hint
    assert package in hint
    assert "pip install" in hint
    _, ours, extra = hint.partition(f"'{DISTRIBUTION}[")
    if ours:
        assert extra.partition("]")[0] in EXTRAS, f"no such extra: {hint}"
