"""Finds and reads the snapshots of a run on this disk, for writers. Takes no lock, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from sonde.errors import RunError
from sonde.schema.snapshots.archive import open_archive
from sonde.schema.snapshots.document import SnapshotDocument, SnapshotReader
from sonde.schema.snapshots.tensors import (
    GROUP_FILE,
    HostTensor,
    Snapshot,
    SnapshotKey,
    archive_name,
    attempt_of,
    group_name,
    hidden_folder,
    parent_name,
    step_of,
    tensors_folder,
)


class StoreFiles:
    """`tensors/` of one rank. A snapshot is a file, or the folder of an earlier version; those of later attempts are in
    separate folders."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self.run, self.rank = run, rank
        self.root = tensors_folder(run) / parent_name(rank)
        self.hidden = hidden_folder(run) / parent_name(rank)

    def folder(self, attempt: int = 0) -> Path:
        return self.root / parent_name(attempt=attempt)

    def attempts(self) -> list[int]:
        later = [attempt for attempt in map(attempt_of, _names(self.root)) if attempt is not None]
        return [attempt for attempt in [0, *sorted(later)] if self.steps(attempt)]

    def steps(self, attempt: int = 0) -> list[int]:
        return sorted(step for step in map(step_of, _names(self.folder(attempt))) if step is not None)

    def keys(self) -> list[SnapshotKey]:
        """All snapshots, in the order of their attempts."""
        return [SnapshotKey(attempt, step) for attempt in self.attempts() for step in self.steps(attempt)]

    def path(self, key: SnapshotKey) -> Path:
        folder = self.folder(key.attempt)
        path = folder / group_name(key.step)
        return path if path.exists() else folder / archive_name(key.step)

    def require(self, key: SnapshotKey) -> None:
        if key.step not in self.steps(key.attempt):
            raise RunError(f"no snapshot of {key}. Available: {self.steps(key.attempt)}.")

    def read(self, key: SnapshotKey, names: Iterable[str] | None = None) -> Snapshot:
        self.require(key)
        return read_snapshot(self._open(self.path(key)), names)

    def needing(self, key: SnapshotKey) -> list[int]:
        """The snapshots of an earlier version that are stored as a difference from this one."""
        if key.attempt:
            return []
        folders = [path for at in self.steps() if (path := self.path(SnapshotKey(0, at))).is_dir()]
        documents = [self._open(path).document for path in folders]
        return [document.step for document in documents if key.step in document.bases]

    def _base(self, step: int) -> SnapshotReader:
        """A snapshot of an earlier version that others are stored as a difference from; it may have been deleted."""
        hidden = self.hidden / group_name(step)
        return self._open(hidden if hidden.exists() else self.path(SnapshotKey(0, step)))

    def _open(self, path: Path) -> SnapshotReader:
        return open_path(path, f"{self.run.name}/{path.name}", self._base)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


def read_snapshot(reader: SnapshotReader, names: Iterable[str] | None = None) -> Snapshot:
    """All tensors of a snapshot, or some."""
    document = reader.document
    tensors = {}
    for name in document.tensors if names is None else names:
        entry = reader.entry(name)
        tensors[name] = HostTensor(reader.bits(name), entry.dtype, entry.shape)
    return Snapshot(document.step, document.time, document.reason, tensors, document.attempt)


def open_path(path: Path, where: str, base: Callable[[int], SnapshotReader]) -> SnapshotReader:
    """The snapshot in a file, or in the folder of an earlier version."""
    try:
        if path.is_dir():
            document = SnapshotDocument.from_bytes((path / GROUP_FILE).read_bytes(), where)
            return SnapshotReader(document, lambda key, offset, size: _read_at(path / key, offset, size), base, where)
        with path.open("rb") as file:
            return open_archive(file, lambda offset, size: _read_at(path, offset, size), base, where)
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}.") from error


def _read_at(path: Path, offset: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if offset < 0:
            offset = max(os.fstat(fd).st_size + offset, 0)
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)
