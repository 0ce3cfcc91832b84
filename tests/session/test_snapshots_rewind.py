"""Whole tensors of a run that returns to an earlier step: the abandoned snapshot and the retaken one are both kept."""

from __future__ import annotations

import copy
import json
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sonde
from sonde.errors import UsageError
from sonde.read.tensors.analysis.run_tensors import RunTensors
from sonde.read.tensors.stores import open_tensor_store
from sonde.schema.layout import row_text
from sonde.show.export.tensors import plan_export, write_export

QUICK = {"writer": {"flush_interval_s": 0.01, "heartbeat_s": 0.05}, "system_metrics": False}
Taken = dict[int, bytes]
"""The bytes of the first weight in the snapshot of each step."""


class Loop:
    """Trains with a snapshot every third step; `histories[k]` is what attempt k shows."""

    def __init__(self, session: Any, *, store: str = "zarr", when: Any = None, **watch: Any) -> None:
        torch.manual_seed(0)
        self.session = session
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.when = when or (lambda step: step % 3 == 0)
        options = {} if store == "zarr" else {"close_s": 120.0}
        plan = sonde.Snapshots(when=self.when, kinds=("param", "grad"), store=store, options=options)
        session.watch(self.model, self.optimizer, snapshots=plan, inspect=False, activations=False, **watch)
        self.histories: list[Taken] = [{}]
        self.step = 0

    def train(self, num_steps: int) -> Loop:
        for _ in range(num_steps):
            if self.when(self.step) or self.step == 0:
                self.histories[-1][self.step] = self.weight()
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 3)).square().mean().backward()
            self.optimizer.step()
            self.step += 1
        return self

    def weight(self) -> bytes:
        return self.model[0].weight.detach().numpy().tobytes()

    def save(self) -> Any:
        return copy.deepcopy(self.model.state_dict())

    def rewind(self, step: int, saved: Any = None) -> Loop:
        """Without a checkpoint the weights stay as they are: the second history differs from the first anyway."""
        if saved is not None:
            self.model.load_state_dict(saved)
        assert self.session.rewind(step)
        self.histories.append({at: weight for at, weight in self.histories[-1].items() if at < step})
        self.step = step
        return self


def check(run: sonde.Run, history: Taken) -> None:
    check_tensors(run.tensors, history)


def check_tensors(tensors: RunTensors, history: Taken) -> None:
    assert tensors.snapshots()["step"].to_pylist() == sorted(history)
    for step, weight in history.items():
        assert tensors.snapshot(step)["param/0.weight"].tobytes() == weight, step
    over_time = tensors.get("param/0.weight")
    assert over_time["step"].values.tolist() == sorted(history)
    assert {step: over_time.sel(step=step).values.tobytes() for step in history} == history


def check_all(run: sonde.Run, loop: Loop) -> None:
    check(run, loop.histories[-1])
    assert run.num_attempts == len(loop.histories)
    for number, history in enumerate(loop.histories):
        check(run.attempt(number), history)
    assert run.verify() == run.warnings == []


@pytest.mark.parametrize("store", ["zarr", pytest.param("icechunk", marks=pytest.mark.slow)])
def test_a_snapshot_taken_again_is_stored_next_to_the_abandoned_one(begin, reopen, store):
    loop = Loop(begin(**QUICK), store=store).train(5)
    saved = loop.save()
    loop.train(8).rewind(5, saved).train(5)  # 6 and 9 are taken again, 12 is not
    run = reopen()
    assert loop.histories[0].keys() == {0, 3, 6, 9, 12}
    assert loop.histories[1].keys() == {0, 3, 6, 9}
    assert loop.histories[0][9] != loop.histories[1][9]
    check_all(run, loop)
    assert run.tensors.snapshots()["attempt"].to_pylist() == [0, 0, 1, 1]
    assert run.attempt(0).tensors.snapshots()["attempt"].to_pylist() == [0] * 5
    assert run.manifest.facts["snapshots"]["taken"] == 7


def test_several_rewinds_one_right_after_the_other(begin, reopen):
    """Nothing waits for the writer in between: each snapshot must know its attempt by itself."""
    loop = Loop(begin(system_metrics=False)).train(8)
    loop.rewind(3).train(5).rewind(6).train(2).rewind(2).train(9).rewind(9).train(1)
    check_all(reopen(), loop)


def test_attempts_that_record_nothing_but_snapshots(begin, reopen):
    nothing: dict[str, Any] = {"params": False, "grads": False, "updates": False, "optim": False}
    session = begin(**QUICK, live_rules=False)
    loop = Loop(session, **nothing).train(5).rewind(1).train(4).rewind(3).train(4)
    run = reopen()
    check_all(run, loop)


def test_what_is_abandoned_and_not_taken_again_is_named_by_its_attempt(begin, reopen):
    run = Loop(begin(**QUICK)).train(8).rewind(5).train(1) and reopen()
    assert run.tensors.snapshots()["step"].to_pylist() == [0, 3]
    with pytest.raises(UsageError, match=r"no snapshot of step 6.*run\.attempt\(0\)\.tensors\.snapshot\(6\)"):
        run.tensors.snapshot(6)
    assert run.attempt(0).tensors.snapshot(6)
    assert run.tensors.snapshot("latest").label == "the snapshot of step 3"


def test_a_live_reader_sees_the_rewind(begin, tmp_path):
    loop = Loop(begin(**QUICK)).train(7)
    assert loop.session.flush()
    run = sonde.open(tmp_path / "runs" / "latest")
    reader = run.tensors.store()
    check_all(run, loop)
    assert reader.read(6, "param/0.weight").tobytes() == loop.histories[0][6]
    loop.rewind(2).train(5)
    assert loop.session.flush()
    check_all(run, loop)
    assert reader.read(6, "param/0.weight").tobytes() == loop.histories[1][6]


def test_the_snapshot_of_a_step_in_progress_is_given_up(begin, reopen):
    """The forward pass of step 6 was made, then training returned to that very step."""
    loop = Loop(begin(**QUICK)).train(6)
    loop.model(torch.full((8, 3), 100.0)).sum().backward()
    loop.rewind(6).train(1)
    run = reopen()
    check_all(run, loop)
    assert run.tensors.snapshots()["attempt"].to_pylist() == [0, 0, 1]


def test_a_snapshot_that_was_asked_for_is_taken_after_the_rewind(begin, reopen):
    loop = Loop(begin(**QUICK), when=lambda step: step == 0).train(5)
    loop.session.snapshot(("grad",))
    loop.rewind(2).train(1)
    run = reopen()
    assert run.tensors.snapshots()["step"].to_pylist() == [0, 2]
    assert {name.partition("/")[0] for name in run.tensors.snapshot(2)} == {"grad"}


def test_a_resumed_run_takes_its_snapshots_again(begin, reopen):
    first = Loop(begin(name="n", **QUICK)).train(5)
    sonde.finish()
    session = begin(name="n", resume=True, **QUICK)
    assert session.rewind(3)
    second = Loop(session)
    second.step = 3
    run = second.train(4) and reopen()
    check(run.attempt(0), first.histories[0])
    check(run, {0: first.histories[0][0], **second.histories[0]})
    assert run.tensors.snapshots()["attempt"].to_pylist() == [0, 1, 1]


def test_every_view_shows_the_last_attempt(begin, reopen, tmp_path):
    loop = Loop(begin(name="views", **QUICK)).train(7).rewind(2).train(2)
    run = reopen()
    for shown, history in ((run, loop.histories[-1]), (run.attempt(0), loop.histories[0])):
        assert sorted(set(shown.tensors.evolution("param/*")["step"].to_pylist())) == sorted(history)
        weights = [np.frombuffer(history[step], np.float32).astype(np.float64) for step in sorted(history)]
        norms = [float(np.linalg.norm(weight)) for weight in weights]
        found = shown.tensors.evolution("param/0.weight")["norm"].to_pylist()
        np.testing.assert_allclose(found, norms)
        (path,) = write_export(plan_export(shown, "weights", "hdf5"), tmp_path / f"{len(history)}.h5")
        assert sonde.read.tensors.files.formats.open_tensors(path)
    compared: Any = sonde.compare(f"{run.path}@attempt=0@3", f"{run.path}@3")
    assert compared.total["relative"] > 0
    paths = {step: Path(path).relative_to(run.path).as_posix() for step, path in sample_paths(run).items()}
    assert paths == {0: "tensors/step-000000000.zarr.zip", 3: "tensors/attempt-0001/step-000000003.zarr.zip"}
    assert sample_paths(run.attempt(0))[3] == str(run.path / "tensors/step-000000003.zarr.zip")


def test_the_dashboard_shows_the_last_attempt(begin, reopen):
    from sonde.show.web.answers import snapshots
    from sonde.show.web.query import Query

    loop = Loop(begin(**QUICK)).train(7).rewind(2).train(2)
    run = reopen()
    for shown, history in ((run, loop.histories[-1]), (run.attempt(0), loop.histories[0])):
        listed = json.loads(snapshots.snapshots(shown, Query("")).body)["snapshots"]
        assert [row["step"] for row in listed] == sorted(history)
        assert shown.tensors.num_snapshots == len(history)
        images = {
            entry["name"]: entry["n"] for entry in json.loads(snapshots.snapshot(shown, 3, Query("")).body)["tensors"]
        }
        image = snapshots.image(shown, 3, images["param/0.weight"], Query("")).body
        assert history[3] in image
    assert json.loads(snapshots.snapshots(run, Query("")).body)["snapshots"][-1]["attempt"] == 1


def sample_paths(run: sonde.Run) -> dict[int, str]:
    from sonde.read.series.views import sample_paths

    return sample_paths(run._now)


def test_the_first_attempt_is_stored_as_before_and_later_ones_in_folders(begin, reopen):
    zarr = pytest.importorskip("zarr")
    loop = Loop(begin(**QUICK)).train(7).rewind(2).train(5)
    run = reopen()
    folder = run.path / "tensors"
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.zip"))
    first = [f"step-{step:09d}.zarr.zip" for step in (0, 3, 6)]
    assert found == sorted([*first, "attempt-0001/step-000000003.zarr.zip", "attempt-0001/step-000000006.zarr.zip"])
    for name, history in (("", loop.histories[0]), ("attempt-0001/", loop.histories[1])):
        archive = zarr.storage.ZipStore(folder / f"{name}step-000000006.zarr.zip", mode="r")
        group = zarr.open_group(archive, mode="r")
        assert group["param/0.weight"][:].tobytes() == history[6]
        assert group.attrs["sonde"].get("attempt") == (1 if name else None)
    rows = catalog_rows(run.path)
    assert [(row[1], json.loads(row[4])["attempt"]) for row in rows] == [(0, 0), (3, 0), (6, 0), (3, 1), (6, 1)]
    assert [row[0] for row in rows[:3]] == [0, 3, 6]


def catalog_rows(run: Path) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(run / "catalog.sqlite")
    rows = connection.execute("select * from snapshots order by id").fetchall()
    connection.close()
    assert all(zlib.crc32(row_text(*row[:-1])) == row[-1] for row in rows)
    return rows


@pytest.mark.parametrize("name", ["step-000000003.zarr.zip", "attempt-0001/step-000000003.zarr.zip"])
def test_damage_is_found_in_every_attempt(begin, reopen, name):
    run = Loop(begin(**QUICK)).train(5).rewind(2).train(3) and reopen()
    path = run.path / "tensors" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    (problem,) = run.verify()
    assert "step 3" in problem
    assert ("of attempt 1" in problem) == name.startswith("attempt")


def test_a_run_as_earlier_versions_wrote_it_is_read_by_its_catalog(begin, reopen):
    """They put snapshots of all attempts into one place, kept the first one of each step, and noted its attempt."""
    loop = Loop(begin(**QUICK)).train(7).rewind(5).train(6)
    run = reopen()
    tensors = run.path / "tensors"
    for step in (6, 9):
        (tensors / f"attempt-0001/step-{step:09d}.zarr.zip").rename(tensors / f"kept-{step}")
    (tensors / "kept-9").rename(tensors / "step-000000009.zarr.zip")
    (tensors / "kept-6").unlink()  # the abandoned one stayed
    (tensors / "attempt-0001").rmdir()
    connection = sqlite3.connect(run.path / "catalog.sqlite")
    for id, step, moment, store, details, _ in catalog_rows(run.path):
        if json.loads(details)["attempt"]:
            connection.execute("delete from snapshots where id = ?", (id,))
            row = (step, step, moment, store, json.dumps({**json.loads(details), "sha256": ""}))
            if step == 9:
                connection.execute("insert into snapshots values (?,?,?,?,?,?)", (*row, zlib.crc32(row_text(*row))))
    connection.commit()
    connection.close()
    check(run, {step: loop.histories[1][step] for step in (0, 3, 9)})
    check(run.attempt(0), loop.histories[0])
    assert run.tensors.snapshots()["attempt"].to_pylist() == [0, 0, 1]
    assert run.verify() == []


# --------------------------------------------------------------------------------------------------------------- stores


@pytest.mark.slow
def test_a_version_of_a_repository_shows_the_attempts_that_were_there(begin, reopen):
    from sonde.write.tensors.store import open_store

    loop = Loop(begin(**QUICK), store="icechunk").train(7)
    sonde.finish()
    path = sonde.open(loop.session.path).path
    store: Any = open_store("icechunk", path, {"close_s": 120.0})
    store.tag("before")
    store.close()
    session = sonde.init(dir=path.parent.parent, resume=str(path), verbose=False, **QUICK)
    assert session.rewind(2)
    again = Loop(session, store="icechunk")
    again.step = 2
    again.train(2)
    run = reopen()
    check(run, {0: loop.histories[0][0], 3: again.histories[0][3]})
    check_tensors(run.tensors.version(tag="before"), loop.histories[0])
    check_tensors(run.tensors.version(branch="main"), {0: loop.histories[0][0], 3: again.histories[0][3]})
    check_tensors(run.attempt(0).tensors.version(branch="main"), loop.histories[0])


@pytest.mark.slow
def test_stock_icechunk_reads_both_attempts(begin, reopen):
    icechunk, zarr = pytest.importorskip("icechunk"), pytest.importorskip("zarr")
    loop = Loop(begin(**QUICK), store="icechunk").train(5).rewind(2).train(3)
    run = reopen()
    storage = icechunk.local_filesystem_storage(str(run.path / "icechunk" / "repository"))
    root = zarr.open_group(icechunk.Repository.open(storage).readonly_session("main").store, mode="r")
    for name, history in (("", loop.histories[0]), ("attempt-0001/", loop.histories[1])):
        assert root[f"{name}step-000000003/param/0.weight"][:].tobytes() == history[3]
    assert "attempt-0001" in dict(root.groups())


# --------------------------------------------------------------------------------------------------------------- kills

CHILD = Path(__file__).parent / "child_snapshots_rewind.py"


def kill_once(folder: Path, seconds: float) -> set[tuple[int, int]]:
    """Train, kill: attempt and step of each acknowledged snapshot."""
    child = subprocess.Popen([sys.executable, str(CHILD), str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    lines = [line.split() for line in child.stdout if line.endswith("\n")]
    child.wait()
    child.stdout.close()
    return {(int(attempt), int(step)) for attempt, step in lines}


def campaign(folder: Path, seed: int, num_kills: int) -> None:
    chance = np.random.default_rng(seed)
    acknowledged: set[tuple[int, int]] = set()
    for _ in range(num_kills):
        acknowledged |= kill_once(folder, float(chance.uniform(0.3, 1.5)))
        (path,) = (folder / "kill").iterdir()
        check_killed(sonde.open(path), acknowledged)


def check_killed(run: sonde.Run, acknowledged: set[tuple[int, int]]) -> None:
    """Every weight is 1,000 times the number of its attempt plus the step."""
    attempts = run.attempts().to_pydict()
    assert run.verify() == []
    for number in attempts["attempt"]:
        reader = open_tensor_store(run.path, attempt=number)
        table = {row["step"]: row["attempt"] for row in run.attempt(number).tensors.snapshots().to_pylist()}
        assert list(table) == reader.steps
        for step, attempt in table.items():
            weights = reader.read(step, "param/weight")
            assert np.array_equal(weights, np.full(weights.shape, 1000 * attempt + step, np.float32)), (attempt, step)
            assert not any(attempts["first_step"][later] <= step for later in range(attempt + 1, number + 1))
        own = {step for attempt, step in acknowledged if attempt == number}
        assert own <= {step for step, attempt in table.items() if attempt == number}


@pytest.mark.slow
def test_kill_9_and_rewinds_leave_every_acknowledged_snapshot_of_every_attempt(tmp_path: Path) -> None:
    campaign(tmp_path, seed=0, num_kills=3)


@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_kill_9_and_rewind_campaign(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, seed, num_kills=4)
