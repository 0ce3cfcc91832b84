"""Pipes, devices and enormous files in a run folder: nothing waits for them, and nothing reads them to their end."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sonde
from sonde.errors import CorruptError, SondeError, UsageError
from sonde.read.run import ranks
from sonde.read.tensors.exports import open_export
from sonde.read.tensors.files.formats import open_tensors
from sonde.run import Run
from sonde.schema.records import Event
from sonde.tune.checkpoint.manager import CheckpointManager
from sonde.write.ranks import RankLog, Start

DEADLINE_S = 60.0
"""No file takes a second; a pipe takes forever."""
EVENT = Event(type="note", message="early", step=2, time=1000.0)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every kind of file that training writes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    with sonde.watch(
        model, optimizer, dir=tmp_path_factory.mktemp("runs"), snapshots=sonde.every(2), verbose=False
    ) as session:
        for _ in range(4):
            loss = model(torch.randn(8, 4)).square().mean()
            sonde.log({"loss": loss})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    path = Path(session.path)
    CheckpointManager(path, model=model, optimizer=optimizer).save(4)
    RankLog(path, 1).write(EVENT, Start(1000.0, None))
    return path


def read(path: Path) -> None:
    """Ask a run for everything; its errors are answers, too."""
    asked: tuple[Callable[[Run], object], ...] = (
        Run.events, Run.system, Run.sites, Run.checkpoints, Run.findings, Run.health,
        lambda run: (run.warnings, run.status, run.structure(), run.verify()),
        lambda run: run.stats("*/*/norm"), lambda run: run.scalars("*"),
        lambda run: run.sql("select count(*) from stats"),
        lambda run: [dict(run.tensors.snapshot(step)) for step in (0, 2)],
    )  # fmt: skip
    try:
        run = Run(path)
    except SondeError:
        return
    for ask in asked:
        try:
            ask(run)
        except SondeError:
            continue


def within_deadline(work: Callable[[], object]) -> bool:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if errors:
        raise errors[0]
    return not thread.is_alive()


@pytest.mark.slow
def test_a_pipe_in_place_of_any_file_does_not_hang_a_reader(everything, tmp_path):
    files = [path.relative_to(everything) for path in sorted(everything.rglob("*")) if path.is_file()]
    assert {"catalog.sqlite", "run.json", "rank-0001.jsonl", "manifest.json"} <= {file.name for file in files}
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(everything, copy)
        (copy / file).unlink()
        os.mkfifo(copy / file)
        assert within_deadline(lambda copy=copy: read(copy)), f"{file} as a pipe hangs"
        shutil.rmtree(copy)


@pytest.mark.parametrize(
    "name", ["catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "catalog.sqlite-journal"]
)
def test_a_pipe_in_place_of_the_catalog_is_reported(finished, name):
    (finished.path / name).unlink(missing_ok=True)
    os.mkfifo(finished.path / name)
    run = Run(finished.path)
    assert any("not a regular file" in warning for warning in run.warnings)
    with pytest.raises(CorruptError, match="not a regular file"):
        run.events()


def test_a_pipe_in_place_of_a_rank_log_is_reported(finished):
    (finished.path / "ranks").mkdir()
    os.mkfifo(finished.path / "ranks" / "rank-0001.jsonl")
    run = Run(finished.path)
    assert any("rank-0001.jsonl cannot be read" in warning for warning in run.warnings)
    assert run.events().num_rows == run.sql("select count(*) as n from events").to_pylist()[0]["n"]


def test_a_rank_log_of_many_gigabytes_is_read_up_to_a_limit(finished):
    log = RankLog(finished.path, 1)
    log.write(EVENT, Start(1000.0, None))
    os.truncate(log.path, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = Run(finished.path)
    assert "rank 1: early" in run.events()["message"].to_pylist()
    assert any("larger than 16 MiB" in warning for warning in run.warnings)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * ranks.MAX_LOG_BYTES / 1024


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights.npz"])
def test_a_pipe_is_not_read_as_weights(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match="not a regular file"):
        open_tensors(tmp_path / name)
    if name != "weights.pt":
        with pytest.raises(UsageError, match="not a regular file"):
            open_export(tmp_path / name)
