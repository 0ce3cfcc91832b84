"""Snapshots as files on the local disk, each a Zarr group. One writer, held to it by a lock; any number of readers.

A snapshot is written whole into a hidden folder and synced, and one rename makes it visible. What a killed writer left
in the hidden folder is removed by the next one.
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
from sonde.schema.tensors import Receipt, Snapshot, archive_name
from sonde.write.durable import sync_folder
from sonde.write.lock import RunLock
from sonde.write.tensors.archive_file import ArchiveWriter
from sonde.write.tensors.codecs import require_codecs
from sonde.write.tensors.files import LakeFiles

_TMP: Final = "tmp-"


class LocalLake:
    """The store "zarr", and the spool of those that are elsewhere. `options` are those of `ArchiveWriter`."""

    def __init__(self, run: Path, *, rank: int = 0, **options: Any) -> None:
        self._writer = ArchiveWriter(rank=rank, **options)
        require_codecs()
        self._files = LakeFiles(run, rank)
        self._lock = self._prepare(self._files.folder, self._files.hidden)

    @property
    def written_bytes(self) -> int:
        return self._writer.written_bytes

    def write(self, snapshot: Snapshot) -> Receipt:
        step = snapshot.step
        if step in self.steps():
            raise UsageError(f"step {step} is in the store already. Delete it first.")
        tmp = self._tmp(step)
        try:
            receipt = self._writer.write(tmp, snapshot)
            _publish(tmp, self._files.folder / archive_name(step))
        except BaseException as error:
            tmp.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise RunError(_explain(step, error)) from error
            raise
        return receipt

    def steps(self) -> list[int]:
        return self._files.steps()

    def read(self, step: int, names: Iterable[str] | None = None) -> Snapshot:
        return self._files.read(step, names)

    def delete(self, step: int) -> None:
        """Forget a snapshot. One that others are a difference to, in a run of an earlier version, is refused."""
        if step not in self.steps():
            raise RunError(f"no snapshot of step {step}. There are: {self.steps()}.")
        if needing := self._files.needing(step):
            raise RunError(
                f"the snapshot of step {step} stays: an earlier version of sonde stored step {needing[0]} as the "
                f"difference to it. Delete step {needing[0]} first."
            )
        tmp = self._tmp(step)
        os.rename(self._files.path(step), tmp)  # noqa: PTH104  system calls go through `os`
        sync_folder(self._files.folder)
        sync_folder(self._files.hidden)
        _remove(tmp)

    def delete_copies(self, uploaded: Iterable[int]) -> None:
        """Delete what is elsewhere too. The newest first: an older one may be needed by it."""
        for step in sorted(set(self.steps()) & set(uploaded), reverse=True):
            if not self._files.needing(step):
                self.delete(step)

    def close(self) -> None:
        self._lock.release()

    def forget_in_child(self) -> None:
        """In a forked child: the lock is the parent's. A child that outlives it must not hold on to it."""
        self._lock.forget()

    def _prepare(self, folder: Path, hidden: Path) -> RunLock:
        hidden.mkdir(parents=True, exist_ok=True)
        lock = RunLock(hidden, patience_s=0.0)  # no reader takes this one
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for made in {folder, folder.parent, hidden, hidden.parent}:
                sync_folder(made)
            for left in hidden.glob(f"{_TMP}*"):
                _remove(left)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise RunError(f"cannot keep snapshots in {folder}: {error.strerror}.") from error
            raise
        return lock

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
        # It may or may not survive a power loss, and was not acknowledged: it must not be seen either.
        with contextlib.suppress(OSError):
            os.rename(final, tmp)  # noqa: PTH104
        raise


def _explain(step: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "The disk is full: free some space, or take fewer snapshots."
    else:
        remedy = "Nothing of it was kept; earlier snapshots are as they were."
    return f"cannot keep the snapshot of step {step}: {error.strerror or error}. {remedy}"
