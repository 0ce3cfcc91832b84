"""Snapshots as files on the local disk, each a Zarr group. One writer, enforced by a lock; any number of readers.

A snapshot is written to a hidden folder and synced, and one rename makes it visible. The next writer removes what a
killed one left in the hidden folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from sonde.errors import RunError, UsageError
from sonde.schema.snapshots.tensors import Receipt, Snapshot, SnapshotKey, archive_name
from sonde.write.durable import make_folder, sync_folder
from sonde.write.lock import RunLock
from sonde.write.tensors.archive_file import ArchiveWriter
from sonde.write.tensors.codecs import require_codecs
from sonde.write.tensors.files import StoreFiles

_TMP: Final = "tmp-"


class LocalStore:
    """The store "zarr", and the spool of remote stores. `options` are those of `ArchiveWriter`."""

    def __init__(self, run: Path, *, rank: int = 0, **options: Any) -> None:
        self._writer = ArchiveWriter(rank=rank, **options)
        require_codecs()
        self._files = StoreFiles(run, rank)
        self._lock = self._prepare(self._files.root, self._files.hidden)

    @property
    def written_bytes(self) -> int:
        return self._writer.written_bytes

    def write(self, snapshot: Snapshot) -> Receipt:
        key = snapshot.key
        if key.step in self.steps(key.attempt):
            raise UsageError(f"{key} is already in the store. Delete it first.")
        tmp = self._tmp(key.step)
        try:
            receipt = self._writer.write(tmp, snapshot)
            _publish(tmp, self._folder(key.attempt) / archive_name(key.step))
        except BaseException as error:
            tmp.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise RunError(_explain(key, error)) from error
            raise
        return receipt

    def attempts(self) -> list[int]:
        return self._files.attempts()

    def steps(self, attempt: int = 0) -> list[int]:
        return self._files.steps(attempt)

    def keys(self) -> list[SnapshotKey]:
        """All snapshots, in the order of their attempts."""
        return self._files.keys()

    def read(self, step: int, names: Iterable[str] | None = None, *, attempt: int = 0) -> Snapshot:
        return self._files.read(SnapshotKey(attempt, step), names)

    def delete(self, step: int, *, attempt: int = 0) -> None:
        """Delete a snapshot. In a run of an earlier version, one that others are stored as a difference from is
        refused."""
        key = SnapshotKey(attempt, step)
        self._files.require(key)
        if needing := self._files.needing(key):
            raise RunError(
                f"cannot delete the snapshot of step {step}: an earlier version of sonde stored step {needing[0]} as a "
                f"difference from it. Delete step {needing[0]} first."
            )
        tmp = self._tmp(step)
        os.rename(self._files.path(key), tmp)  # noqa: PTH104  system calls go through `os`
        sync_folder(self._files.folder(attempt))
        sync_folder(self._files.hidden)
        _remove(tmp)

    def delete_copies(self, uploaded: Iterable[SnapshotKey]) -> None:
        """Delete snapshots that were uploaded. The newest first: it may need an older one."""
        for key in sorted(set(self.keys()) & set(uploaded), reverse=True):
            if not self._files.needing(key):
                self.delete(key.step, attempt=key.attempt)

    def close(self) -> None:
        self._lock.release()

    def forget_in_child(self) -> None:
        """In a forked child: the lock is the parent's. A child that outlives it must not keep it."""
        self._lock.forget()

    def _prepare(self, folder: Path, hidden: Path) -> RunLock:
        make_folder(hidden)
        lock = RunLock(hidden, patience_s=0.0)  # no reader takes this one
        try:
            make_folder(folder)
            for made in {folder, folder.parent, hidden, hidden.parent}:
                sync_folder(made)
            for left in hidden.glob(f"{_TMP}*"):
                _remove(left)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise RunError(f"cannot store snapshots in {folder}: {error.strerror}.") from error
            raise
        return lock

    def _folder(self, attempt: int) -> Path:
        """The folder of an attempt, created if missing, with a durable name."""
        folder = self._files.folder(attempt)
        make_folder(folder)
        return folder

    def _tmp(self, step: int) -> Path:
        return self._files.hidden / f"{_TMP}{step}-{secrets.token_hex(4)}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        os.unlink(path)  # noqa: PTH108


def _publish(tmp: Path, final: Path) -> None:
    os.rename(tmp, final)  # noqa: PTH104  system calls go through `os`, where a test can break them
    try:
        sync_folder(final.parent)
    except BaseException:
        # It may or may not survive a power loss, and was not acknowledged: it must not be visible either.
        with contextlib.suppress(OSError):
            os.rename(final, tmp)  # noqa: PTH104
        raise


def _explain(key: SnapshotKey, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "The disk is full: free some space, or take fewer snapshots."
    else:
        remedy = "It was discarded; earlier snapshots are intact."
    return f"cannot store the snapshot of {key}: {error.strerror or error}. {remedy}"
