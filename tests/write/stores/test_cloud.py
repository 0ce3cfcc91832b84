"""The store in a bucket, against a real S3 server: the shared suite, dead networks, killed servers and processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sonde.errors import RunError, UnknownNameError, UsageError
from sonde.read.tensors.stores import open_tensor_store, upload_state
from sonde.schema.snapshots.addresses import Address
from sonde.schema.snapshots.tensors import Snapshot, SnapshotKey
from sonde.testing.stores import StoreTests, drifting
from sonde.write.tensors.files import StoreFiles
from sonde.write.tensors.push import push
from sonde.write.tensors.repository import Repository
from sonde.write.tensors.store import Store, open_store

URL = "s3://lake/runs"


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
class TestS3(StoreTests):
    def open(self, run: Path) -> Store:
        return open_store(f"{URL}/{run.parent.name}-{run.name}", run, {"keep_local": False})


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
class TestS3KeepingLocalCopies(StoreTests):
    def open(self, run: Path) -> Store:
        return open_store(f"{URL}/{run.parent.name}-{run.name}-kept", run)


def weight(step: int) -> bytes:
    return drifting(step)["param/weight"].flat().tobytes()


def write(store: Any, *steps: int) -> None:
    for step in steps:
        store.write(Snapshot(step, float(step), "every", drifting(step)))


def remote_steps(run: Path, url: str) -> list[int]:
    from sonde.read.tensors.icechunk import IcechunkTensorStore

    reader = IcechunkTensorStore(Address.parse(url).for_run(run))
    landed = [commit.step for commit in reader.history() if commit.step is not None]
    assert len(landed) == len(set(landed)), "a snapshot was committed twice"
    for step in reader.steps:
        assert reader.read(step, "param/weight").tobytes() == weight(step)
    return reader.steps


@pytest.mark.slow
def test_it_all_arrives_and_the_run_reads_from_there(s3: Any, run_folder: Path) -> None:
    url = f"{URL}/arrives"
    store: Any = open_store(url, run_folder, {"keep_local": False})
    write(store, 1, 2, 3)
    assert store.drain(60)
    assert store.status() == {"url": f"{url}/project/{run_folder.name}", "waiting": 0, "uploaded": 3, "last_error": ""}
    store.close()
    assert remote_steps(run_folder, url) == [1, 2, 3]
    assert [path.name for path in (run_folder / "tensors").iterdir()] == []
    assert open_tensor_store(run_folder).read(2, "param/weight").tobytes() == weight(2)


@pytest.mark.slow
def test_no_credential_is_written_to_the_run(s3: Any, run_folder: Path) -> None:
    store: Any = open_store(f"{URL}/secret", run_folder)
    write(store, 1)
    assert store.drain(60)
    store.close()
    for path in run_folder.rglob("*"):
        if path.is_file():
            assert b"very-secret" not in path.read_bytes(), path
            assert b"AWS_" not in path.read_bytes(), path


def test_wrong_addresses_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="environment"):
        open_store("s3://key:secret@bucket/prefix", tmp_path)
    with pytest.raises(UnknownNameError, match="store type"):
        open_store("ftp://bucket/prefix", tmp_path)
    with pytest.raises(UsageError, match="has no bucket"):
        open_store("s3:///prefix", tmp_path)
    with pytest.raises(UsageError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/prefix", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.fault
def test_a_black_hole_is_never_waited_for(run_folder: Path, use_endpoint: Any, s3_server: Any) -> None:
    """A server that accepts connections and never answers: writing continues, and all arrives later."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(64)
        use_endpoint(f"http://127.0.0.1:{hole.getsockname()[1]}")
        url = f"{URL}/hole"
        store: Any = open_store(url, run_folder, {"timeout_s": 2.0, "linger_s": 0.0, "close_s": 0.0})
        write(store, 1, 2, 3)
        assert store.read(2).tensors["param/weight"].flat().tobytes() == weight(2)
        wait_for(lambda: "no response" in store.status()["last_error"])
        assert store.status()["waiting"] == 3
        store.close()
    use_endpoint(s3_server.url)
    again: Any = open_store(url, run_folder)
    write(again, 4)
    assert again.drain(60)
    assert again.status()["last_error"] == ""
    again.close()
    assert remote_steps(run_folder, url) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.fault
def test_a_server_that_dies_during_uploads_and_comes_back(tmp_path: Path, run_folder: Path, use_endpoint: Any) -> None:
    """Through a gate in front of the server, shut in the middle of things: everything arrives, nothing twice."""
    server = start_server(tmp_path)
    gate = Gate(server.port)
    use_endpoint(f"http://127.0.0.1:{gate.port}")
    url = f"{URL}/dies"
    store: Any = open_store(url, run_folder, {"timeout_s": 5.0})
    try:
        for step in range(12):
            write(store, step)
            if step % 4 == 1:
                gate.shut()
            if step % 4 == 3:
                time.sleep(0.3)
                gate.open()
            time.sleep(0.1)
        gate.open()
        assert store.drain(90), store.status()
        store.close()
        assert remote_steps(run_folder, url) == list(range(12))
    finally:
        gate.close()
        server.stop()


@pytest.mark.slow
@pytest.mark.fault
def test_uploads_continue_after_kill_9_of_the_training(s3: Any, run_folder: Path, use_endpoint: Any) -> None:
    """The training dies while the network is dead; `push` brings up what it left."""
    url = f"{URL}/killed"
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(64)
        use_endpoint(f"http://127.0.0.1:{hole.getsockname()[1]}")
        code = f"""
import os, signal
from pathlib import Path
from sonde.write.tensors.store import open_store
from sonde.schema.snapshots.tensors import Snapshot, SnapshotKey
from sonde.testing.stores import drifting
store = open_store({url!r}, Path({str(run_folder)!r}), {{"linger_s": 0.0, "timeout_s": 1.0}})
for step in range(3):
    store.write(Snapshot(step, float(step), "every", drifting(step)))
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert done.returncode == -signal.SIGKILL
        wait_for(lambda: not is_uploading(run_folder))
    use_endpoint(s3.url)
    told: list[tuple[int, int]] = []
    pushed = push(run_folder, told=lambda done, total: told.append((done, total)))
    assert (told[0], told[-1]) == ((0, 3), (3, 3))
    assert (pushed.uploaded, pushed.waiting, pushed.last_error) == (3, 0, "")
    assert push(run_folder).uploaded == 0
    assert remote_steps(run_folder, url) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.fault
def test_an_uploader_that_is_killed_is_replaced(s3: Any, run_folder: Path) -> None:
    url = f"{URL}/replaced"
    store: Any = open_store(url, run_folder)
    for step in (0, 2, 4):
        write(store, step)
        os.kill(store._process._process.pid, signal.SIGKILL)
        store._process._process.wait()
        write(store, step + 1)
        assert store.drain(60)
    store.close()
    assert remote_steps(run_folder, url) == list(range(6))


@pytest.mark.slow
def test_sixty_commits_of_two_writers_all_land(s3: Any, tmp_path: Path) -> None:
    """Two ranks commit to one repository at the same time; each has its own arrays."""
    address = Address.parse(f"{URL}/two-writers")
    failures: list[BaseException] = []

    def commit_all(rank: int) -> None:
        try:
            local: Any = open_store("zarr", tmp_path, {"rank": rank})
            repository = Repository(address, rank=rank)
            for step in range(30):
                write(local, step)
                key = SnapshotKey(0, step)
                repository.commit(key, StoreFiles(tmp_path, rank).path(key))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=commit_all, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    from sonde.read.tensors.icechunk import IcechunkTensorStore

    for rank in (0, 1):
        reader = IcechunkTensorStore(address, rank=rank)
        assert reader.steps == list(range(30))
        assert all(reader.read(step, "param/weight").tobytes() == weight(step) for step in (0, 11, 29))
    assert len([commit for commit in reader.history() if commit.step is not None]) == 60


@pytest.mark.slow
def test_another_address_for_the_same_run_is_refused(s3: Any, run_folder: Path) -> None:
    open_store(f"{URL}/one", run_folder).close()
    with pytest.raises(RunError, match="A run has only one store"):
        open_store(f"{URL}/two", run_folder)
    state = upload_state(run_folder)
    assert state is not None
    assert state.url == f"{URL}/one/project/{run_folder.name}"


# ------------------------------------------------------------------------------------------------------------- helpers


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def is_uploading(run: Path) -> bool:
    from sonde.errors import RunLockedError
    from sonde.write.tensors.upload import Spool

    try:
        Spool(run).lock().release()
    except RunLockedError:
        return True
    return False


def start_server(folder: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("s3_of_its_own", Path(__file__).parent / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.S3Server(folder / "moto.log")


class Gate:
    """A TCP door in front of a server. Shut, it cuts every connection and refuses new ones."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._is_open, self._is_done = True, False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._pumps: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def open(self) -> None:
        self._is_open = True

    def shut(self) -> None:
        self._is_open = False
        for pair in self._pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def close(self) -> None:
        self._is_done = True
        self.shut()
        self._thread.join(5)
        self._listener.close()
        for pump in self._pumps:
            pump.join(5)
        for pair in self._pairs:
            for end in pair:
                end.close()

    def _accept(self) -> None:
        self._listener.settimeout(0.1)
        while not self._is_done:
            try:
                inside, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not self._is_open:
                inside.close()
                continue
            outside = socket.create_connection(("127.0.0.1", self._to))
            self._pairs.append((inside, outside))
            for source, sink in ((inside, outside), (outside, inside)):
                self._pumps.append(threading.Thread(target=_pump, args=(source, sink), daemon=True))
                self._pumps[-1].start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
