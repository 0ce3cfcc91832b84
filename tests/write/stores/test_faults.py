"""kill -9 at any point, a full disk, a power failure: what was acknowledged is there, whole, or nothing is."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sonde.errors import RunError
from sonde.read.tensors.stores import open_tensor_store
from sonde.schema.snapshots.tensors import Snapshot
from sonde.testing.stores import drifting
from sonde.write.tensors.store import open_store

CHILD = Path(__file__).parent / "child_snapshots.py"


def start(folder: Path, first: int, stride: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHILD), str(folder), str(first), str(stride)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check(run: Path, acks: Path) -> None:
    """Acknowledged snapshots are readable, the one that was deleted is gone, and no other is visible but whole."""
    lines = [int(line) for line in acks.read_text().split()] if acks.exists() else []
    acknowledged = {step for step in lines if step >= 0}
    if -1 in lines:
        acknowledged.discard(1)
    reader = open_tensor_store(run)
    visible = set(reader.steps)
    assert acknowledged - {1} <= visible, run  # a delete of 1 may have begun without having been acknowledged
    assert visible <= set(range(max(acknowledged, default=-1) + 2)), run
    for step in visible:
        for name, tensor in drifting(step % 7, size=300).items():
            assert reader.read(step, name).tobytes() == tensor.flat().tobytes(), (run, step, name)
    store = open_store("zarr", run)  # by itself, without repair; what was left half done is gone
    store.write(Snapshot(1000, 0.0, "", drifting(3)))
    assert set(store.steps()) == visible | {1000}
    assert not [path for path in (run / ".tensors").iterdir() if path.name.startswith(("tmp-", "root-"))]
    store.close()


def campaign(tmp_path: Path, first: int, stride: int) -> int:
    child = start(tmp_path, first, stride)
    output, _ = child.communicate(timeout=600)
    last = int(output)
    for point in range(first, last + 1, stride):
        check(tmp_path / str(point), tmp_path / f"{point}.ack")
        shutil.rmtree(tmp_path / str(point))
    return last


def test_dying_at_some_system_calls_loses_nothing(tmp_path: Path) -> None:
    assert campaign(tmp_path, first=7, stride=97) > 100


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dying_at_any_system_call_loses_nothing(tmp_path: Path) -> None:
    assert campaign(tmp_path, first=0, stride=1) > 100


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kill_9_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    import random

    for point in range(25):
        child = start(tmp_path, point, 0)
        acks = tmp_path / f"{point}.ack"
        while not (acks.exists() and acks.stat().st_size):
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(random.Random(point).uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        check(tmp_path / str(point), acks)


def test_all_is_synced_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure would leave: every file and folder was synced after its last change, before the rename."""
    dirty: set[str] = set()
    seen: list[str] = []

    def path_of(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def after(name: str, note: Any) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = real(*arguments, **keywords)
            note(*arguments)
            return result

        monkeypatch.setattr(os, name, call)

    def renamed(source: Any, target: Any) -> None:
        unsynced = {path for path in dirty if path.startswith(str(source))}
        assert not unsynced, unsynced
        seen.append(Path(target).name)
        dirty.add(str(Path(target).parent))

    store = open_store("zarr", tmp_path)
    after("write", lambda fd, *_: dirty.add(path_of(fd)))
    after("fsync", lambda fd: dirty.discard(path_of(fd)))
    after("rename", renamed)
    store.write(Snapshot(5, 0.0, "", drifting(5)))
    assert seen == ["step-000000005.zarr.zip"]
    assert not dirty, "the name of the snapshot itself was not synced"
    monkeypatch.undo()
    store.close()


def test_a_file_that_may_not_grow_is_a_clean_error(tmp_path: Path) -> None:
    """A quota, as the kernel enforces it: a short write first, then the error."""
    code = f"""
import json, resource, signal, sys
from pathlib import Path
from sonde.errors import RunError
from sonde.write.tensors.store import open_store
from sonde.schema.snapshots.tensors import Snapshot
from sonde.testing.stores import drifting
sys.dont_write_bytecode = True
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = open_store("zarr", Path({str(tmp_path)!r}))
store.write(Snapshot(1, 0.0, "", drifting(1)))
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
try:
    store.write(Snapshot(2, 0.0, "", drifting(2)))
    told = "nothing"
except RunError as error:
    told = str(error)
left = sorted(path.name for path in Path({str(tmp_path / ".tensors")!r}).iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, before)
store.write(Snapshot(2, 0.0, "", drifting(2)))
print(json.dumps([told, left, store.steps()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    told, left, steps = json.loads(done.stdout)
    assert "cannot store the snapshot of step 2: File too large. The disk is full" in told
    assert left == ["lock"]
    assert steps == [1, 2]
    assert open_tensor_store(tmp_path).read(2, "param/weight").tobytes() == drifting(2)["param/weight"].flat().tobytes()


@pytest.mark.fault
def test_a_full_file_system_is_a_clean_error(tmp_path: Path) -> None:
    """A real file system of one mebibyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        store = open_store("zarr", disk, {"compression": "none"})
        written: list[int] = []

        def fill() -> None:
            for step in range(1000):
                store.write(Snapshot(step, 0.0, "", drifting(step % 5, size=10_000)))
                written.append(step)

        with pytest.raises(RunError, match="No space left on device"):
            fill()
        assert written
        assert store.steps() == written
        assert [path.name for path in (disk / ".tensors").iterdir()] == ["lock"]
        for step in written:
            assert store.read(step).tensors["param/weight"].nbytes == 40_000
        store.delete(0)
        store.write(Snapshot(2000, 0.0, "", drifting(1, size=10_000)))
        store.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_error_of_the_disk_when_the_name_is_synced_is_not_an_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("zarr", tmp_path)
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "tensors"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match="Input/output error"):
        store.write(Snapshot(1, 0.0, "", drifting(1)))
    assert store.steps() == []
    monkeypatch.undo()
    store.close()


@pytest.mark.parametrize("kind", ["zarr", pytest.param("icechunk", marks=pytest.mark.slow)])
def test_a_forked_child_that_outlives_its_parent_does_not_hold_the_store(tmp_path: Path, kind: str) -> None:
    """The training is killed; a worker of its data loader is not. The run can be gone on with."""
    code = f"""
import os, signal, sys, time
from pathlib import Path
from sonde.write.tensors.snapshots import abandon
from sonde.write.tensors.store import open_store
from sonde.schema.snapshots.tensors import Snapshot
from sonde.testing.stores import drifting
store = open_store({kind!r}, Path({str(tmp_path)!r}))
store.write(Snapshot(1, 0.0, "", drifting(1)))
child = os.fork()
if child == 0:
    abandon(store)
    os.write(1, f"{{os.getpid()}}\\n".encode())
    time.sleep(60)
    os._exit(0)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""
    training = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    worker = int(training.stdout.readline())
    try:
        assert training.wait(30) == -signal.SIGKILL
        store = open_store(kind, tmp_path)
        assert store.steps() == [1]
        store.write(Snapshot(2, 0.0, "", drifting(2)))
        store.close()
    finally:
        os.kill(worker, signal.SIGKILL)
        training.stdout.close()
