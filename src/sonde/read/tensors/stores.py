"""Whole tensors of a run, read from `tensors/` one at a time. Damage raises CorruptError and never yields numbers.

Only the directory and the document of a snapshot and the chunks of the requested tensor are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.errors import RunError, UsageError
from sonde.read.run.folder import inside, open_inside, open_regular
from sonde.read.run.log import list_folder
from sonde.read.tensors.readers import CachingStore, TensorStore
from sonde.read.tensors.view import SnapshotView, known_steps
from sonde.schema.snapshots.addresses import read_address
from sonde.schema.snapshots.archive import open_archive
from sonde.schema.snapshots.document import MAX_DOCUMENT_BYTES, SnapshotDocument, SnapshotReader
from sonde.schema.snapshots.tensors import (
    GROUP_FILE,
    SnapshotKey,
    archive_name,
    attempt_of,
    group_name,
    hidden_folder,
    parent_name,
    step_of,
    tensors_folder,
)
from sonde.schema.snapshots.uploads import UploadState, upload_file

if TYPE_CHECKING:
    from sonde.read.tensors.icechunk import IcechunkTensorStore


def open_tensor_store(
    run: Path,
    *,
    rank: int = 0,
    attempt: int | None = None,
    branch: str | None = None,
    tag: str | None = None,
    commit: str | None = None,
) -> SnapshotView:
    """The snapshots of a run: for each step the one of the last attempt that covers it, or with `attempt` as at the end
    of that attempt.

    With `branch`, `tag` or `commit`: the state of the run's Icechunk repository there, without local snapshots.
    """
    run = Path(run)
    state = upload_state(run, rank=rank)
    if state is None:
        if branch or tag or commit:
            raise UsageError(f"{run} has no Icechunk repository, so it has no branches, tags or commits.")
        return SnapshotView(run, FolderSource(run, rank), attempt=attempt)
    from sonde.read.tensors.icechunk import IcechunkTensorStore, VersionView

    address = read_address(state.url, run)
    if branch or tag or commit:
        there = IcechunkTensorStore(address, rank=rank, branch=branch, tag=tag, commit=commit)
        return VersionView(run, there, attempt=attempt)
    source = SpooledSource(run, rank, lambda: IcechunkTensorStore(address, rank=rank, branch=state.branch))
    return SnapshotView(run, source, attempt=attempt)


def open_local_tensor_store(run: Path, *, attempt: int | None = None) -> SnapshotView:
    """The snapshots on this disk only."""
    return SnapshotView(run, FolderSource(run), attempt=attempt)


def upload_state(run: Path, *, rank: int = 0) -> UploadState | None:
    """The state of the upload; None if the run's snapshots stay on this disk."""
    path = upload_file(Path(run), rank)
    try:
        return UploadState.from_bytes(read_file(path, 0, -1), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}.") from error


def upload_warnings(run: Path, *, is_live: bool) -> list[str]:
    """Warn about snapshots that were not uploaded. While a run is alive this is normal, unless uploading fails."""
    try:
        state = upload_state(run)
    except RunError as error:
        return [str(error)]
    waiting = [] if state is None else state.waiting(FolderSource(run).keys())
    if state is None or not waiting or (is_live and not state.last_error):
        return []
    why = f" ({state.last_error})" if state.last_error else ""
    snapshots = "1 snapshot is" if len(waiting) == 1 else f"{len(waiting)} snapshots are"
    return [f"{snapshots} on this disk and not yet at {state.url}{why}; upload with `sonde snapshot --upload`"]


def read_file(path: Path, offset: int, size: int) -> bytes:
    """Read bytes of a file from an offset (negative: from the end), at most `size` (negative: all).

    Links in a run folder are not followed, so that an untrusted folder cannot expose files outside it.
    """
    with open_regular(path, str(path)) as file:
        length = os.fstat(file.fileno()).st_size
        start = max(length + offset, 0) if offset < 0 else min(offset, length)
        return os.pread(file.fileno(), length - start if size < 0 else min(size, length - start), start)


class FolderTensorStore(CachingStore):
    """`tensors/` on a disk, or its folder of a later attempt. Later snapshots are found, too."""

    def __init__(self, run: Path, *, rank: int = 0, attempt: int = 0) -> None:
        super().__init__()
        self.run, self.rank, self.attempt = run, rank, attempt
        self._folder = tensors_folder(run) / parent_name(rank, attempt)
        self._hidden = hidden_folder(run) / parent_name(rank)

    @property
    def steps(self) -> list[int]:
        return sorted(step for step in map(step_of, list_folder(self._folder)) if step is not None)

    def path(self, step: int) -> Path:
        """The file of a snapshot, or the folder that an earlier version wrote."""
        folder = self._folder / group_name(step)
        return folder if folder.is_dir() else self._folder / archive_name(step)

    def reader(self, step: int) -> SnapshotReader:
        path = self.path(step)
        if not path.exists():
            raise RunError(f"{self.run} has no snapshot of step {step}. {known_steps(self.steps)}")
        return self._kept(step, lambda: self._open(path))

    def _open(self, path: Path) -> SnapshotReader:
        folder = f"{self.run.name}/{parent_name(attempt=self.attempt)}".removesuffix("/")
        where = f"{folder}/{path.name}"
        if path.is_dir():
            document = SnapshotDocument.from_bytes(self._bytes(path / GROUP_FILE, 0, MAX_DOCUMENT_BYTES + 1), where)
            return SnapshotReader(document, lambda key, *at: self._bytes(path / key, *at), self._base, where)
        try:
            with open_inside(self.run, str(path.relative_to(self.run))) as file:
                return open_archive(file, lambda *at: self._bytes(path, *at), self._base, where)
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}.") from error

    def _base(self, step: int) -> SnapshotReader:
        """A snapshot of an earlier version that others are stored relative to; it may have been deleted."""
        hidden = self._hidden / group_name(step)
        return self._open(hidden if hidden.is_dir() else self.path(step))

    def _bytes(self, path: Path, offset: int, size: int) -> bytes:
        """List a folder; one that is a link is not followed."""
        try:
            inside(self.run, str(path.parent.relative_to(self.run)))
            return read_file(path, offset, size)
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}.") from error


class FolderSource:
    """The snapshots of a rank on this disk: one folder per attempt after the first."""

    def __init__(self, run: Path, rank: int = 0) -> None:
        self.run, self.rank = run, rank
        self._root = tensors_folder(run) / parent_name(rank)

    @property
    def name(self) -> str:
        return str(self.run)

    def attempts(self) -> list[int]:
        later = sorted(attempt for attempt in map(attempt_of, list_folder(self._root)) if attempt is not None)
        return [attempt for attempt in (0, *later) if self.store(attempt).steps]

    def store(self, attempt: int) -> FolderTensorStore:
        return FolderTensorStore(self.run, rank=self.rank, attempt=attempt)

    def keys(self) -> list[SnapshotKey]:
        """All snapshots, in the order of their attempts."""
        return [SnapshotKey(attempt, step) for attempt in self.attempts() for step in self.store(attempt).steps]


class SpooledSource:
    """Snapshots on this disk and in a repository, which is opened when needed."""

    def __init__(self, run: Path, rank: int, open_remote: Callable[[], IcechunkTensorStore]) -> None:
        self._local, self._open_remote = FolderSource(run, rank), open_remote
        self._remote: IcechunkTensorStore | None = None

    @property
    def name(self) -> str:
        return self._local.name

    def attempts(self) -> list[int]:
        return sorted({*self._local.attempts(), *(key.attempt for key in self.state().uploaded)})

    def store(self, attempt: int) -> SpooledTensorStore:
        return SpooledTensorStore(self, self._local.store(attempt))

    def remote(self) -> IcechunkTensorStore:
        if self._remote is None:
            self._remote = self._open_remote()
        return self._remote

    def state(self) -> UploadState:
        return upload_state(self._local.run, rank=self._local.rank) or UploadState("")


class SpooledTensorStore(TensorStore):
    """The snapshots of one attempt."""

    def __init__(self, source: SpooledSource, local: FolderTensorStore) -> None:
        self._source, self._local = source, local
        self._remote: IcechunkTensorStore | None = None

    @property
    def steps(self) -> list[int]:
        return sorted({*self._local.steps, *self._source.state().steps(self._local.attempt)})

    def reader(self, step: int) -> SnapshotReader:
        return self._of(step).reader(step)

    def _of(self, step: int) -> TensorStore:
        if step in self._local.steps:
            return self._local
        if step not in self.steps:
            raise RunError(f"{self._local.run} has no snapshot of step {step}. {known_steps(self.steps)}")
        if self._remote is None:
            self._remote = self._source.remote().store(self._local.attempt)
        if step not in self._remote.steps:
            self._remote.refresh()
        return self._remote
