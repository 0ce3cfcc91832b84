"""A program may change its working directory, or lose it: the run stays where it began."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.errors import RunError
from sonde.session.entry import current


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    sonde.finish()
    current.use(None)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def steps(self, num: int) -> None:
        for _ in range(num):
            loss = self.model(torch.ones(2, 4)).pow(2).sum()
            loss.backward()
            self.optimizer.step()
            sonde.log({"loss": loss})


def check(run: Any, *, steps: int) -> None:
    assert (run.status, run.warnings, run.verify()) == ("finished", [], [])
    assert run.scalars("loss").column("step").to_pylist() == list(range(steps))
    assert run.stats("grad/weight/norm").column("step").to_pylist() == list(range(steps))


def test_the_working_directory_changes_right_after_init(tmp_path: Path, elsewhere: Path, monkeypatch: Any) -> None:
    training = Training()
    session = sonde.init(project="p", verbose=False)
    monkeypatch.chdir(elsewhere)
    session.watch(training.model, training.optimizer, budget=0.5)
    training.steps(5)
    session.finish()
    check(sonde.open(tmp_path / "runs" / "latest"), steps=5)
    assert not list(elsewhere.iterdir())


def test_the_working_directory_changes_between_steps(tmp_path: Path, elsewhere: Path, monkeypatch: Any) -> None:
    training = Training()
    session = sonde.init(dir="../" + tmp_path.name + "/runs", verbose=False, writer={"flush_interval_s": 0.01})
    session.watch(training.model, training.optimizer, snapshots=2)
    for place in (elsewhere, tmp_path, elsewhere):
        training.steps(2)
        assert session.flush()
        monkeypatch.chdir(place)
    sonde.snapshot()
    training.steps(1)
    session.finish()
    run = sonde.open(tmp_path / "runs" / "latest")
    check(run, steps=7)
    assert run.tensors.snapshots().column("step").to_pylist() == [0, 2, 4, 6]
    assert not list(elsewhere.iterdir())


def test_the_working_directory_changes_inside_a_with_block(
    tmp_path: Path, elsewhere: Path, monkeypatch: Any, capfd: Any
) -> None:
    training = Training()
    with sonde.watch(training.model, training.optimizer):
        training.steps(2)
        monkeypatch.chdir(elsewhere)
        training.steps(2)
    check(sonde.open(tmp_path / "runs" / "latest"), steps=4)
    told = capfd.readouterr().err
    assert "recording to runs/default/" in told
    assert f" {tmp_path / 'runs'}/default/" in told, "from here the short path leads nowhere"


def test_a_resumed_run_stays_where_it_is(tmp_path: Path, elsewhere: Path, monkeypatch: Any) -> None:
    for resume in (False, "runs/latest"):
        training = Training()
        session = sonde.init(resume=resume, verbose=False)
        session.watch(training.model, training.optimizer)
        monkeypatch.chdir(elsewhere)
        training.steps(3)
        session.finish()
        monkeypatch.chdir(tmp_path)
    check(sonde.open("latest"), steps=6)


def test_a_working_directory_that_is_deleted_costs_nothing(tmp_path: Path, elsewhere: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(elsewhere)
    training = Training()
    session = sonde.init(dir=tmp_path / "runs", verbose=True)
    session.watch(training.model, training.optimizer, snapshots=2)
    training.steps(2)
    shutil.rmtree(elsewhere)
    training.steps(2)
    session.finish()
    os.chdir(tmp_path)
    check(sonde.open(tmp_path / "runs" / "latest"), steps=4)


def test_a_run_begins_in_a_deleted_working_directory(tmp_path: Path, elsewhere: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(elsewhere)
    elsewhere.rmdir()
    training = Training()
    session = sonde.init(dir=tmp_path / "runs", verbose=True)
    session.watch(training.model, training.optimizer, budget=0.5)
    training.steps(3)
    session.finish()
    with pytest.raises(RunError, match=r"working directory no longer exists.*dir= or SONDE_DIR"):
        sonde.init(verbose=False)
    os.chdir(tmp_path)
    check(sonde.open(tmp_path / "runs" / "latest"), steps=3)


def test_a_mirror_writes_where_it_began(tmp_path: Path, elsewhere: Path, monkeypatch: Any) -> None:
    pytest.importorskip("tensorboard")
    training = Training()
    session = sonde.init(project="p", name="n", verbose=False)
    session.watch(training.model, training.optimizer, mirror="tensorboard")
    monkeypatch.chdir(elsewhere)
    training.steps(2)
    session.finish()
    assert list((tmp_path / "tensorboard").rglob("events.*"))
    assert not list(elsewhere.iterdir())


def test_checkpoints_are_saved_where_they_began(tmp_path: Path, elsewhere: Path, monkeypatch: Any) -> None:
    pytest.importorskip("safetensors")
    from sonde.tune import CheckpointManager

    training = Training()
    manager = CheckpointManager("kept", model=training.model, optimizer=training.optimizer, background=True)
    monkeypatch.chdir(elsewhere)
    manager.save(0)
    manager.close()
    assert [checkpoint.path for checkpoint in manager.list()] == [tmp_path / "kept" / "step-000000000"]
    assert not list(elsewhere.iterdir())
