"""Find and read the snapshots of a run on this disk, for those that write them. Takes no lock, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from sonde.errors import RunError
from sonde.schema.archive import open_archive
from sonde.schema.lake import SnapshotDocument, SnapshotReader
from sonde.schema.tensors import (
    GROUP_FILE,
    HostTensor,
    Snapshot,
    archive_name,
    group_name,
    hidden_folder,
    step_of,
    tensors_folder,
)


class LakeFiles:
    """`tensors/` of one rank. A snapshot is a file, or the folder that an earlier version made."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self.run, self.rank = run, rank
        self.folder = (tensors_folder(run) / group_name(0, rank)).parent
        self.hidden = (hidden_folder(run) / group_name(0, rank)).parent

    def steps(self) -> list[int]:
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(step for step in map(step_of, names) if step is not None)

    def path(self, step: int) -> Path:
        folder = self.folder / group_name(step)
        return folder if folder.exists() else self.folder / archive_name(step)

    def read(self, step: int, names: Iterable[str] | None = None) -> Snapshot:
        if step not in self.steps():
            raise RunError(f"no snapshot of step {step}. There are: {self.steps()}.")
        return read_snapshot(self._open(self.path(step)), names)

    def needing(self, step: int) -> list[int]:
        """The snapshots of an earlier version that are stored as the difference to this one."""
        folders = [at for at in self.steps() if self.path(at).is_dir()]
        return [at for at in folders if step in self._open(self.path(at)).document.bases]

    def _base(self, step: int) -> SnapshotReader:
        """A snapshot of an earlier version that others are a difference to; it may have been deleted."""
        hidden = self.hidden / group_name(step)
        return self._open(hidden if hidden.exists() else self.path(step))

    def _open(self, path: Path) -> SnapshotReader:
        return open_path(path, f"{self.run.name}/{path.name}", self._base)


def read_snapshot(reader: SnapshotReader, names: Iterable[str] | None = None) -> Snapshot:
    """All tensors of a snapshot, or some."""
    document = reader.document
    tensors = {}
    for name in document.tensors if names is None else names:
        entry = reader.entry(name)
        tensors[name] = HostTensor(reader.bits(name), entry.dtype, entry.shape)
    return Snapshot(document.step, document.time, document.reason, tensors)


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
