"""The store of commits, on a disk: the shared suite, history, time travel, expiry, and exactly one writer."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sonde.errors import MissingPackageError, RunError, RunLockedError, UnknownNameError, UsageError
from sonde.read.tensors.icechunk import IcechunkTensorStore
from sonde.read.tensors.stores import open_tensor_store
from sonde.schema.snapshots.addresses import local_address
from sonde.schema.snapshots.tensors import Snapshot, SnapshotKey
from sonde.testing.stores import StoreTests, drifting
from sonde.write.tensors import spooled
from sonde.write.tensors.files import StoreFiles
from sonde.write.tensors.repository import Repository
from sonde.write.tensors.store import Store, open_store


@pytest.mark.slow
class TestIcechunk(StoreTests):
    def open(self, run: Path) -> Store:
        return open_store("icechunk", run)


def weight(step: int) -> bytes:
    return drifting(step)["param/weight"].flat().tobytes()


def write(store: Any, *steps: int) -> None:
    for step in steps:
        store.write(Snapshot(step, float(step), "every", drifting(step)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with six snapshots, a tag at the third, a branch at the second, the first deleted."""
    run = tmp_path_factory.mktemp("project") / "run"
    run.mkdir()
    store: Any = open_store("icechunk", run)
    write(store, 10, 20, 30, 40, 50, 60)
    assert store.drain(60)
    store.tag("best", 30)
    store.create_branch("what-if", 20)
    store.delete(10)
    store.close()
    return run


@pytest.mark.slow
class TestFinishedRun:
    def test_everything_is_in_the_repository_and_the_spool_is_empty(self, finished: Path) -> None:
        reader = open_tensor_store(finished)
        assert reader.steps == [20, 30, 40, 50, 60]
        assert all(reader.read(step, "param/weight").tobytes() == weight(step) for step in reader.steps)
        assert [path.name for path in (finished / "tensors").iterdir()] == []

    def test_every_snapshot_is_a_commit(self, finished: Path) -> None:
        reader: Any = open_tensor_store(finished, branch="main")
        assert [commit.step for commit in reader.history() if commit.step is not None] == [60, 50, 40, 30, 20, 10]
        assert next(iter(reader.history())).message == "delete step 10"

    def test_time_travel_by_tag_branch_and_commit(self, finished: Path) -> None:
        assert open_tensor_store(finished, tag="best").steps == [10, 20, 30]
        assert open_tensor_store(finished, branch="what-if").steps == [10, 20]
        reader: Any = open_tensor_store(finished, branch="main")
        fifty = next(commit.id for commit in reader.history() if commit.step == 50)
        before = open_tensor_store(finished, commit=fifty)
        assert before.steps == [10, 20, 30, 40, 50]
        assert before.read(10, "param/weight").tobytes() == weight(10)

    def test_what_does_not_exist_is_said(self, finished: Path) -> None:
        with pytest.raises(UnknownNameError, match='Did you mean "best"'):
            open_tensor_store(finished, tag="bset")
        with pytest.raises(UnknownNameError, match="what-if"):
            open_tensor_store(finished, branch="nope")
        with pytest.raises(UnknownNameError, match='no commit "HEAD"'):
            open_tensor_store(finished, commit="HEAD")
        with pytest.raises(UsageError, match="one of"):
            open_tensor_store(finished, branch="main", tag="best")

    def test_zarr_python_opens_a_commit(self, finished: Path) -> None:
        import zarr

        reader = IcechunkTensorStore(local_address(finished), tag="best")
        group: Any = zarr.open_group(reader._store, mode="r")
        assert sorted(name for name, _ in group.members()) == [f"step-{step:09d}" for step in (10, 20, 30)]

    def test_the_run_may_be_moved(self, finished: Path, tmp_path: Path) -> None:
        import shutil

        moved = tmp_path / "elsewhere"
        shutil.copytree(finished, moved)
        assert open_tensor_store(moved).read(40, "param/weight").tobytes() == weight(40)
        assert str(finished).encode() not in (moved / ".tensors/upload.json").read_bytes()


@pytest.mark.slow
def test_a_tag_names_the_step_that_was_asked_for_or_nothing(run_folder: Path) -> None:
    store: Any = open_store("icechunk", run_folder)
    write(store, 1, 2, 3)
    store.tag("second", 2)  # with no waiting in between: its commit does not exist yet
    store.tag("newest")
    for name_it in (store.tag, store.create_branch):
        with pytest.raises(RunError, match=r"no commit contains step 7. Available: \[1, 2, 3\]"):
            name_it("seventh", 7)
    with pytest.raises(RunError, match='the tag "second" already exists, and tags never move'):
        store.tag("second", 3)
    store.close()
    assert open_tensor_store(run_folder, tag="second").steps == [1, 2]
    assert open_tensor_store(run_folder, tag="newest").steps == [1, 2, 3]
    reader: Any = open_tensor_store(run_folder, branch="main")
    assert (reader.tags, reader.branches) == (["newest", "second"], ["main"])


@pytest.mark.slow
def test_a_branch_moves_back_and_a_time_may_be_a_datetime(run_folder: Path) -> None:
    store: Any = open_store("icechunk", run_folder)
    write(store, 1, 2, 3)
    store.tag("first", 1)
    store.create_branch("what-if", 3)
    assert store.reset_branch("what-if", 2) == store.history()[1]["id"]
    for wrong, says in (({"name": "main", "step": 1}, "acknowledged"), ({"name": "nothing", "step": 1}, "no branch")):
        with pytest.raises(RunError, match=says):
            store.reset_branch(**wrong)
    with pytest.raises(RunError, match="a step or a tag"):
        store.reset_branch("what-if")
    assert store.expire(datetime(2020, 1, 1, tzinfo=UTC)) == 0
    store.close()
    assert open_tensor_store(run_folder, branch="what-if").steps == [1, 2]
    assert open_tensor_store(run_folder).steps == [1, 2, 3]
    store = open_store("icechunk", run_folder)
    store.reset_branch("what-if", tag="first")
    store.close()
    assert open_tensor_store(run_folder, branch="what-if").steps == [1]


@pytest.mark.slow
def test_expiry_forgets_commits_and_frees_what_only_they_used(run_folder: Path) -> None:
    store: Any = open_store("icechunk", run_folder)
    write(store, 1, 2, 3)
    assert store.drain(60)
    store.delete(1)
    store.delete(2)
    before = size_of(run_folder / "icechunk")
    assert store.expire(time.time()) > 0
    assert size_of(run_folder / "icechunk") < before
    assert store.read(3).tensors["param/weight"].flat().tobytes() == weight(3)
    store.close()


@pytest.mark.slow
def test_what_was_uploaded_is_found_again_without_the_file_that_says_so(run_folder: Path) -> None:
    store: Any = open_store("icechunk", run_folder)
    write(store, 1, 2)
    assert store.drain(60)
    store.close()
    (run_folder / ".tensors/upload.json").unlink()
    store = open_store("icechunk", run_folder)
    write(store, 3)
    assert store.drain(60)
    assert store.steps() == [1, 2, 3]
    assert store.read(1).tensors["param/weight"].flat().tobytes() == weight(1)
    store.close()


@pytest.mark.slow
def test_training_never_imports_icechunk_or_zarr(run_folder: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from sonde.write.tensors.store import open_store
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
import numpy as np
store = open_store("icechunk", Path({str(run_folder)!r}))
store.write(Snapshot(1, 0.0, "", {{"param/w": HostTensor.of(np.ones(5, np.float32))}}))
assert store.drain(60)
store.read(1)
store.close()
print(sorted({{"icechunk", "zarr", "obstore"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.slow
def test_a_second_writer_of_a_local_repository_is_refused(tmp_path: Path) -> None:
    """Sixty commits of two writers: one is refused, and none of the other's is lost."""
    local = open_store("zarr", tmp_path)
    write(local, *range(60))
    first = Repository(local_address(tmp_path))
    landed = []
    for step in range(60):
        if step % 2:
            with pytest.raises(RunLockedError):
                Repository(local_address(tmp_path), rank=1)
        key = SnapshotKey(0, step)
        landed.append(first.commit(key, StoreFiles(tmp_path).path(key)))
    first.close()
    local.close()
    assert len(set(landed)) == 60
    assert IcechunkTensorStore(local_address(tmp_path)).steps == list(range(60))


def test_without_the_package_it_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled.importlib.util, "find_spec", lambda name: None)
    for kind in ("icechunk", "s3://bucket/prefix"):
        with pytest.raises(MissingPackageError, match=r"pip install 'sonde-ml\[tensors\]'"):
            open_store(kind, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_repository_has_no_branches(tmp_path: Path) -> None:
    open_store("zarr", tmp_path).close()
    with pytest.raises(UsageError, match="no Icechunk repository"):
        open_tensor_store(tmp_path, tag="best")


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_tag_names_a_step_of_the_last_attempt_or_of_the_one_that_was_asked_for(run_folder: Path) -> None:
    store: Any = open_store("icechunk", run_folder, {"close_s": 120.0})
    for attempt in (0, 1):
        store.write(Snapshot(3, 0.0, "", drifting(attempt), attempt=attempt))
    store.tag("last", 3)
    store.tag("first", 3, attempt=0)
    with pytest.raises(RunError, match="no commit contains step 3 of attempt 2"):
        store.tag("none", 3, attempt=2)
    store.delete(3, attempt=1)
    store.close()
    for tag, seed in (("first", 0), ("last", 1)):
        found = open_tensor_store(run_folder, tag=tag).read(3, "param/weight")
        assert found.tobytes() == drifting(seed)["param/weight"].flat().tobytes()
    assert (
        open_tensor_store(run_folder).read(3, "param/weight").tobytes() == drifting(0)["param/weight"].flat().tobytes()
    )
