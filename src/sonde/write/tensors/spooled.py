"""A remote store: snapshots are kept on this disk, acknowledged, and uploaded by another process.

Nothing waits for a slow or dead network. Snapshots that could not be uploaded stay in the spool, where readers find
them, and are uploaded in the next session or by `sonde snapshot --upload`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from sonde.errors import MissingPackageError, RunError, UsageError
from sonde.schema.snapshots.addresses import Address, written_address
from sonde.schema.snapshots.document import SnapshotReader
from sonde.schema.snapshots.tensors import Receipt, Snapshot, SnapshotKey, hidden_folder
from sonde.schema.snapshots.uploads import UploadState
from sonde.write.tensors.files import open_path, read_snapshot
from sonde.write.tensors.local import LocalStore
from sonde.write.tensors.upload import LINGER_S, TIMEOUT_S, Spool, command_line

OPTIONS: Final = (
    "branch",
    "keep_local",
    "close_s",
    "timeout_s",
    "linger_s",
    "compression",
    "chunk_mib",
    "keep_mantissa_bits",
)
"""Options of every store that has a spool."""
_POLL_S: Final = 0.02
_EXIT_S: Final = 10.0


class SpooledStore:
    """A local store in front of a repository."""

    def __init__(
        self,
        run: Path,
        address: Address,
        *,
        rank: int = 0,
        branch: str = "main",
        keep_local: bool = True,
        close_s: float = 20.0,
        timeout_s: float = TIMEOUT_S,
        linger_s: float = LINGER_S,
        **options: Any,
    ) -> None:
        _require("icechunk", address)
        _require("zarr", address)
        self._run, self._address, self._rank, self.close_s = run, address, rank, close_s
        self._local = LocalStore(run, rank=rank, **options)
        self._spool = Spool(run, rank)
        self._is_closed = False
        try:
            self._begin(UploadState(written_address(address, run), branch, keep_local))
        except BaseException:
            self._local.close()
            raise
        self._process = _Process(
            {"run": str(run.absolute()), "rank": rank, "timeout_s": timeout_s, "linger_s": linger_s},
            hidden_folder(run) / "uploader.log",
        )
        if self._waiting():
            self._process.look()

    @property
    def written_bytes(self) -> int:
        return self._local.written_bytes

    # -------------------------------------------------------------------------------------------------- store interface

    def write(self, snapshot: Snapshot) -> Receipt:
        if snapshot.key in self._state().uploaded:
            raise UsageError(f"{snapshot.key} is already in the store. Delete it first.")
        receipt = self._local.write(snapshot)
        self._process.look()
        self._sweep()
        return receipt

    def attempts(self) -> list[int]:
        return sorted({key.attempt for key in (*self._local.keys(), *self._state().uploaded)})

    def steps(self, attempt: int = 0) -> list[int]:
        return sorted({*self._local.steps(attempt), *self._state().steps(attempt)})

    def read(self, step: int, names: Iterable[str] | None = None, *, attempt: int = 0) -> Snapshot:
        key = SnapshotKey(attempt, step)
        if step in self._local.steps(attempt):
            return self._local.read(step, names, attempt=attempt)
        if key not in self._state().uploaded:
            raise RunError(f"no snapshot of {key}. Available: {self.steps(attempt)}.")
        with tempfile.TemporaryDirectory(dir=hidden_folder(self._run), prefix="tmp-") as folder:
            return read_snapshot(self._fetched(key, Path(folder)), names)

    def delete(self, step: int, *, attempt: int = 0) -> None:
        """Asks the remote store, and waits for its answer."""
        if step not in self.steps(attempt):
            raise RunError(f"no snapshot of {SnapshotKey(attempt, step)}. Available: {self.steps(attempt)}.")
        if step in self._local.steps(attempt):
            self._local.delete(step, attempt=attempt)
        self._process.ask("delete", step=step, attempt=attempt)  # in any case: it may be uploading at this moment

    def close(self) -> None:
        """Wait a while for the uploads; the uploader continues with the rest for a few minutes."""
        if self._is_closed:
            return
        self._is_closed = True
        self.drain(self.close_s)
        self._sweep()
        self._process.leave(wait=not self._waiting())
        self._local.close()

    def forget_in_child(self) -> None:
        """In a forked child: neither the lock nor the uploader is ours."""
        self._is_closed = True
        self._local.forget_in_child()
        self._process.forget_in_child()

    # -------------------------------------------------------------------------------------------- methods of this store

    def status(self) -> dict[str, Any]:
        """For run.json: waiting and uploaded snapshots, and the last error."""
        return self._state().facts(self._local.keys())

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to upload. False: something is."""
        end = time.monotonic() + timeout_s
        while self._waiting() and time.monotonic() < end:
            self._process.keep_alive()
            time.sleep(_POLL_S)
        return not self._waiting()

    def tag(self, name: str, step: int | None = None, *, attempt: int | None = None) -> str:
        """Tag the current state of the repository, or the state when a step was added. Waits for uploads in progress.
        If several attempts have the step, the last one counts, unless `attempt` is given."""
        self._require_arrived(step)
        return str(self._process.ask("tag", name=name, step=step, attempt=attempt))

    def create_branch(self, name: str, step: int | None = None, *, attempt: int | None = None) -> str:
        """Create a branch from the current state of the repository, or from the state when a step was added; like
        `tag`."""
        self._require_arrived(step)
        return str(self._process.ask("branch", name=name, step=step, attempt=attempt))

    def reset_branch(self, name: str, step: int | None = None, *, tag: str | None = None) -> str:
        """Move an existing branch back to the state when a step was added, or to a tag. Later commits stay readable by
        their ids and tags until they expire. The branch that snapshots are committed to does not move while it is
        written: their steps would be uploaded again."""
        return str(self._process.ask("reset", name=name, step=step, tag=tag))

    def history(self) -> list[dict[str, Any]]:
        """Every commit, newest first."""
        return list(self._process.ask("history"))

    def expire(self, before: float | datetime) -> int:
        """Delete commits before a time (a `datetime`, or seconds since 1970) and free the space that only they used."""
        since_1970 = before.timestamp() if isinstance(before, datetime) else before
        return int(self._process.ask("expire", before=since_1970))

    # -------------------------------------------------------------------------------------------------------- internals

    def _begin(self, wanted: UploadState) -> None:
        if self._spool.file.exists():
            known = self._spool.state()
            if (known.url, known.branch) != (wanted.url, wanted.branch):
                raise RunError(
                    f"snapshots of this run go to {known.url} ({known.branch}), not to {wanted.url} ({wanted.branch}). "
                    "A run has only one store; start another run."
                )
        else:
            self._spool.keep(wanted)

    def _state(self) -> UploadState:
        return self._spool.state()

    def _waiting(self) -> list[SnapshotKey]:
        return self._state().waiting(self._local.keys())

    def _require_arrived(self, step: int | None) -> None:
        """A snapshot that is still in the spool has no commit yet."""
        end = time.monotonic() + float(self.close_s)
        while late := [key for key in self._waiting() if step in (None, key.step)]:
            if time.monotonic() > end:
                raise RunError(
                    f"the snapshot of {late[0]} has not been uploaded to {self._address} yet: "
                    f"{self._state().last_error or 'it is in progress'}. "
                    "Try again later, or run `sonde snapshot --upload`."
                )
            self._process.keep_alive()
            time.sleep(_POLL_S)

    def _sweep(self) -> None:
        """Delete local copies of uploaded snapshots, unless they are to be kept."""
        state = self._state()
        if not state.keeps_local:
            self._local.delete_copies(state.uploaded)

    def _fetched(self, key: SnapshotKey, folder: Path, *, is_base: bool = False) -> SnapshotReader:
        """A snapshot from the remote store; `is_base`: another one, of an earlier version, is stored as a difference
        from it."""
        target = folder / f"{key.step}-{is_base}"
        if not target.exists():
            self._process.ask("fetch", step=key.step, attempt=key.attempt, path=str(target), is_base=is_base)

        def base(step: int) -> SnapshotReader:
            return self._fetched(SnapshotKey(0, step), folder, is_base=True)

        return open_path(target, f"{self._address}/{key.step}", base)


class _Process:
    """The uploader as its parent sees it. Only `ask` waits for the network."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        self._options, self._log = options, log
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = b""
        self._num_asked = 0
        self._next_start = 0.0

    def look(self) -> None:
        """Notify it of new snapshots in the spool."""
        self.keep_alive()
        self._send({"do": "look"})

    def keep_alive(self) -> None:
        """Start or restart it, at most once every few seconds."""
        if (self._process is None or self._process.poll() is not None) and time.monotonic() >= self._next_start:
            self._next_start = time.monotonic() + 2.0
            self._start()

    def ask(self, what: str, **details: Any) -> Any:
        """An answer from the remote store, or a RunError if there is none in time."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._num_asked += 1
        self._send({"do": what, "id": self._num_asked, **details})
        end = time.monotonic() + float(self._options["timeout_s"]) * 2
        while (answer := self._answer(end)) is not None:
            if answer["id"] == self._num_asked:
                if "error" in answer:
                    raise RunError(f"{what}: {answer['error']}")
                return answer["found"]
        raise RunError(f"{what}: the uploader did not respond. See {self._log}.")

    def forget_in_child(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)
            process.returncode = 0

    def leave(self, *, wait: bool) -> None:
        """Close its input: it continues alone with what is left."""
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipes(process)
        if wait:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_S)
        if process.poll() is None:
            process.returncode = 0  # it is left running on purpose; no one waits for it

    def _start(self) -> None:
        if self._process is not None:
            _close_pipes(self._process)
        self._answers = b""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command_line({**self._options, "parent": os.getpid()}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the training, not for its upload
            )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def _send(self, request: dict[str, Any]) -> None:
        """A full or broken pipe only loses a `look`: the uploader checks by itself when it starts or is done."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._process.stdin.fileno(), json.dumps(request).encode() + b"\n")

    def _answer(self, end: float) -> dict[str, Any] | None:
        process = self._process
        if process is None or process.stdout is None:
            return None
        while b"\n" not in self._answers:
            poll = select.poll()
            poll.register(process.stdout.fileno(), select.POLLIN)
            if not poll.poll(max(int(1000 * (end - time.monotonic())), 0)):
                return None
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._answers += data
        line, _, self._answers = self._answers.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _require(package: str, address: Address) -> None:
    """Check without importing it: this is the training process."""
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(package, "tensors", f"The store at {address}")
