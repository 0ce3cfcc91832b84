"""The uploader: a separate process that commits the snapshots in the spool, one after the other.

It is started fresh, never forked: icechunk hangs in a forked child. It reports its progress in a file that anyone may
read; it takes requests as lines of JSON, and ends when its input ends and nothing is left, or there is no progress for
long. An attempt without progress is ended by restarting: a call that hangs cannot be ended otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NoReturn

from sonde.errors import RunLockedError
from sonde.schema.snapshots.addresses import read_address
from sonde.schema.snapshots.tensors import SnapshotKey, archive_name
from sonde.schema.snapshots.uploads import UPLOAD_LOCK, UploadState, upload_file
from sonde.schema.words import in_words
from sonde.write.durable import write_durably
from sonde.write.lock import RunLock
from sonde.write.tensors.archive_file import ArchiveWriter
from sonde.write.tensors.files import StoreFiles
from sonde.write.tensors.repository import Repository

TIMEOUT_S: Final = 120.0
LINGER_S: Final = 300.0
_MAX_BACK_OFF_S: Final = 30.0
_POLL_S: Final = 0.5
_MAX_ERROR: Final = 500


class Spool:
    """The snapshots of a run on this disk, and the file that says which of them are uploaded."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self.run, self.rank = run, rank
        self.file = upload_file(run, rank)
        self._files = StoreFiles(run, rank)

    @property
    def _lock_folder(self) -> Path:
        return self._files.hidden / UPLOAD_LOCK

    def state(self) -> UploadState:
        return UploadState.from_bytes(self.file.read_bytes(), str(self.file))

    def keep(self, state: UploadState) -> None:
        state.time = time.time()
        write_durably(self.file, state.to_bytes())

    def keys(self) -> list[SnapshotKey]:
        return self._files.keys()

    @contextlib.contextmanager
    def archive(self, key: SnapshotKey) -> Iterator[Path]:
        """The file of a snapshot. One that an earlier version stored in a folder is turned into a file first: it may be
        stored as a difference from others."""
        path = self._files.path(key)
        if not path.is_dir():
            yield path
            return
        with tempfile.TemporaryDirectory(dir=self._lock_folder) as folder:
            path = Path(folder) / archive_name(key.step)
            ArchiveWriter(rank=self.rank).write(path, self._files.read(key))
            yield path

    def lock(self) -> RunLock:
        """One uploader per run."""
        self._lock_folder.mkdir(exist_ok=True)
        return RunLock(self._lock_folder, patience_s=0.0)


class Uploader:
    """Commits waiting snapshots. Every failure is recorded, and the next attempt comes later."""

    def __init__(self, spool: Spool, *, tick: Callable[[], None] = lambda: None) -> None:
        self.spool, self.state, self._tick = spool, spool.state(), tick
        self._repository: Repository | None = None
        self._num_failures = 0
        self.next_time = 0.0
        """The time of the next attempt, on the monotonic clock."""
        self.last_success = 0.0

    @property
    def repository(self) -> Repository:
        if self._repository is None:
            self._repository = Repository(
                read_address(self.state.url, self.spool.run),
                rank=self.spool.rank,
                branch=self.state.branch,
                tick=self._tick,
            )
            self._learn(self._repository.keys())
        return self._repository

    def _learn(self, keys: list[SnapshotKey]) -> None:
        """Find uploaded snapshots that we do not know of, because the state file was lost."""
        unknown = [key for key in keys if key not in self.state.uploaded]
        if unknown:
            self.state.uploaded |= dict.fromkeys(unknown, "")
            self.spool.keep(self.state)

    def waiting(self) -> list[SnapshotKey]:
        return self.state.waiting(self.spool.keys())

    def upload_next(self) -> None:
        """Upload one snapshot, the oldest first."""
        waiting = self.waiting()
        if not waiting:
            return
        key = waiting[0]
        self._tick()
        try:
            with self.spool.archive(key) as path:
                self.state.uploaded[key] = self.repository.commit(key, path)
        except Exception as error:  # noqa: BLE001  whatever the network does, the snapshot waits and the reason is recorded
            self.failed(f"{key}: {in_words(error)}")
        else:
            self._num_failures, self.next_time, self.state.last_error = 0, 0.0, ""
            self.last_success = time.monotonic()
            self.spool.keep(self.state)

    def failed(self, why: str) -> None:
        """Retry later: 1, 2, 4 … seconds."""
        self.close()
        self.next_time = time.monotonic() + min(2.0**self._num_failures, _MAX_BACK_OFF_S)
        self._num_failures += 1
        self.state.last_error = why[:_MAX_ERROR]
        with contextlib.suppress(OSError):  # a full disk: the next state is written when there is space
            self.spool.keep(self.state)

    def close(self) -> None:
        repository, self._repository = self._repository, None
        if repository is not None:
            repository.close()


# -------------------------------------------------------------------------------------------------------------- process


class UploadProcess:
    """Requests in, answers out, and uploads in between."""

    def __init__(self, spool: Spool, *, parent: int, timeout_s: float, linger_s: float) -> None:
        self._last_tick = time.monotonic()
        self._is_busy = self._is_orphan = False
        self._timeout_s, self._linger_s = timeout_s, linger_s
        self._requests: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._uploader = Uploader(spool, tick=self._tick)
        self._parent = parent

    def work(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        end: float | None = None
        last_success = 0.0
        while True:
            request = self._next_request(is_alone=end is not None)
            if request is not None:
                self._answer(request)
            if end is None and self._is_orphan:
                end = time.monotonic() + self._linger_s
            if time.monotonic() >= self._uploader.next_time:
                self._busy(self._uploader.upload_next)
            if self._uploader.last_success > last_success and end is not None:
                end = time.monotonic() + self._linger_s
            last_success = self._uploader.last_success
            if end is not None and (not self._uploader.waiting() or time.monotonic() > end):
                return

    def _next_request(self, *, is_alone: bool) -> dict[str, Any] | None:
        try:
            if self._uploader.waiting() and time.monotonic() >= self._uploader.next_time:
                return self._requests.get_nowait()
            return self._requests.get(timeout=_POLL_S if not is_alone else 0.05)
        except Empty:
            return None

    def _answer(self, request: dict[str, Any]) -> None:
        if request["do"] == "look":
            return
        try:
            found = self._busy(lambda: self._do(request))
            answer = {"id": request["id"], "found": found}
        except Exception as error:  # noqa: BLE001  reported to whoever asked
            self._uploader.close()
            answer = {"id": request["id"], "error": in_words(error)}
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()

    def _do(self, request: dict[str, Any]) -> Any:
        repository, uploader = self._uploader.repository, self._uploader
        match request["do"]:
            case "fetch":
                return repository.fetch(_key(request), Path(request["path"]), is_base=request["is_base"])
            case "delete":
                repository.delete(_key(request))
                uploader.state.uploaded.pop(_key(request), None)
                return uploader.spool.keep(uploader.state)
            case "tag":
                return repository.tag(request["name"], request["step"], request["attempt"])
            case "branch":
                return repository.create_branch(request["name"], request["step"], request["attempt"])
            case "reset":
                return repository.reset_branch(request["name"], request["step"], request["tag"])
            case "history":
                return repository.history()
            case "expire":
                return repository.expire(datetime.fromtimestamp(request["before"], UTC))
        raise ValueError(f"unknown request {request['do']!r}")

    def _busy(self, work: Callable[[], Any]) -> Any:
        self._tick()
        self._is_busy = True
        try:
            return work()
        finally:
            self._is_busy = False

    def _tick(self) -> None:
        self._last_tick = time.monotonic()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._requests.put(json.loads(line))
        self._is_orphan = True
        self._requests.put(None)  # wakes waiting threads

    def _watch(self) -> None:
        while True:
            time.sleep(min(self._timeout_s / 4, 1.0))
            if os.getppid() != self._parent:  # a forked child of the dead parent may hold our input open
                self._is_orphan = True
            if self._is_busy and time.monotonic() - self._last_tick > self._timeout_s:
                self._uploader.state.last_error = (
                    f"no response from {self._uploader.state.url} within {self._timeout_s:g} s"
                )
                with contextlib.suppress(OSError):
                    self._uploader.spool.keep(self._uploader.state)
                _start_over(self._is_orphan)


def _key(request: dict[str, Any]) -> SnapshotKey:
    return SnapshotKey(request["attempt"], request["step"])


def command_line(options: dict[str, Any]) -> list[str]:
    """The command that starts the process. The folder of the training script is not on its path: a `queue.py` there
    would be imported instead of Python's own."""
    begin = (
        f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); "
        "import sonde.write.tensors.upload as upload; upload.main()"
    )
    return [sys.executable, "-P", "-c", begin, json.dumps(options)]


def _start_over(is_orphan: bool) -> NoReturn:
    """A fresh image of this process: the hanging call is gone, the pipes stay, locks are acquired again."""
    options = json.loads(sys.argv[1])
    options["linger_s"] = options.get("linger_s", LINGER_S) / 2 if is_orphan else options.get("linger_s", LINGER_S)
    options["delay_s"] = min(max(2 * options.get("delay_s", 0.5), 1.0), _MAX_BACK_OFF_S)
    os.execv(sys.executable, command_line(options))  # noqa: S606


def main() -> None:
    options = json.loads(sys.argv[1])
    time.sleep(options.get("delay_s", 0.0))
    spool = Spool(Path(options["run"]), options.get("rank", 0))
    timeout_s, linger_s = options.get("timeout_s", TIMEOUT_S), options.get("linger_s", LINGER_S)
    lock = _wait_for_lock(spool, linger_s)
    try:
        UploadProcess(spool, parent=options["parent"], timeout_s=timeout_s, linger_s=linger_s).work()
    finally:
        lock.release()


def _wait_for_lock(spool: Spool, patience_s: float) -> RunLock:
    """The uploader of the last session may still be running."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return spool.lock()
        except RunLockedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
