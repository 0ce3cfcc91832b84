"""Whole tensors from an Icechunk repository, at its current state or at a commit, tag or branch.

Reads the same files with the same code as from a disk, and only the required byte ranges of a shard.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.errors import RunError, UnknownNameError, UsageError
from sonde.read.tensors.readers import CachingStore
from sonde.read.tensors.view import SnapshotView, known_steps
from sonde.schema.snapshots.addresses import Address, icechunk_storage
from sonde.schema.snapshots.document import SnapshotDocument, SnapshotReader
from sonde.schema.snapshots.tensors import GROUP_FILE, attempt_of, group_name, older_group, parent_name, step_of
from sonde.schema.words import in_words


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of the repository."""

    id: str
    message: str
    time: float
    step: int | None
    """The snapshot it added, if any."""


class IcechunkTensorStore(CachingStore):
    """A repository at one point of its history; opened on a branch, it is that branch's newest state."""

    def __init__(
        self,
        address: Address,
        *,
        rank: int = 0,
        branch: str | None = None,
        tag: str | None = None,
        commit: str | None = None,
    ) -> None:
        super().__init__()
        if sum(name is not None for name in (branch, tag, commit)) > 1:
            raise UsageError("give only one of branch, tag and commit.")
        self.address, self._rank = address, rank
        self._branch = branch or (None if tag or commit else "main")
        self._tag, self._commit = tag, commit
        self._attempt = 0
        self._repository = _open(address)
        self._store = self._session().store

    @property
    def name(self) -> str:
        return str(self.address)

    @property
    def steps(self) -> list[int]:
        found = map(step_of, self._list(parent_name(self._rank, self._attempt)))
        return sorted(step for step in found if step is not None)

    def attempts(self) -> list[int]:
        """The attempts with a snapshot here."""
        names = self._list(parent_name(self._rank))
        later = sorted(attempt for attempt in map(attempt_of, names) if attempt is not None)
        return [attempt for attempt in (0, *later) if self.store(attempt).steps]

    def store(self, attempt: int) -> IcechunkTensorStore:
        """The snapshots of another attempt, at the same point of the history."""
        other = copy.copy(self)
        other._attempt = attempt
        CachingStore.__init__(other)
        return other

    def refresh(self) -> None:
        """Load new commits."""
        self._store = self._session().store
        self._forget()

    def history(self) -> Iterator[Commit]:
        """The commits that led here, newest first."""
        for info in self._repository.ancestry(branch=self._branch, tag=self._tag, snapshot_id=self._commit):
            step = info.metadata.get("step")
            yield Commit(str(info.id), str(info.message), info.written_at.timestamp(), step)

    @property
    def branches(self) -> list[str]:
        return sorted(self._repository.list_branches())

    @property
    def tags(self) -> list[str]:
        return sorted(self._repository.list_tags())

    def _session(self) -> Any:
        import icechunk

        try:
            return self._repository.readonly_session(self._branch, tag=self._tag, snapshot_id=self._commit)
        except icechunk.IcechunkError as error:
            if self._branch is not None and self._branch not in self.branches:
                raise UnknownNameError("branch", self._branch, self.branches) from error
            if self._tag is not None and self._tag not in self.tags:
                raise UnknownNameError("tag", self._tag, self.tags) from error
            if self._commit is not None and "invalid snapshot id" in str(error):
                known = [str(info.id) for info in self._repository.ancestry(branch="main")]
                raise UnknownNameError("commit", self._commit, known) from error
            raise RunError(f"cannot read {self.address}: {in_words(error)}.") from error

    def reader(self, step: int) -> SnapshotReader:
        return self._kept(step, lambda: self._open(step))

    def _open(self, step: int) -> SnapshotReader:
        group = group_name(step, self._rank, self._attempt)
        if not self._exists(f"{group}/{GROUP_FILE}"):
            raise RunError(f"{self.address} has no snapshot of step {step}. {known_steps(self.steps)}")
        return self._open_group(group)

    def _base(self, step: int) -> SnapshotReader:
        """A snapshot of an earlier version that others are stored relative to; it may have been deleted."""
        group = group_name(step, self._rank)
        deleted = older_group(group)
        return self._open_group(deleted if self._exists(f"{deleted}/{GROUP_FILE}") else group)

    def _open_group(self, group: str) -> SnapshotReader:
        where = f"{self.address}/{group}"
        document = SnapshotDocument.from_bytes(self._bytes(f"{group}/{GROUP_FILE}"), where)
        return SnapshotReader(document, lambda key, *at: self._bytes(f"{group}/{key}", *at), self._base, where)

    def _exists(self, key: str) -> bool:
        return bool(self._sync(self._store.exists(key)))

    def _list(self, prefix: str) -> list[str]:
        async def listed() -> list[str]:
            return [name.strip("/") async for name in self._store.list_dir(prefix)]

        names: list[str] = self._sync(listed())
        return names

    def _bytes(self, key: str, offset: int = 0, size: int = -1) -> bytes:
        from zarr.abc.store import RangeByteRequest, SuffixByteRequest
        from zarr.core.buffer import default_buffer_prototype

        wanted: Any = None
        if offset < 0:
            wanted = SuffixByteRequest(-offset)
        elif size >= 0:
            wanted = RangeByteRequest(offset, offset + size)
        found = self._sync(self._store.get(key, default_buffer_prototype(), wanted))
        if found is None:
            raise RunError(f"{key} is missing from {self.address}.")
        data: bytes = found.to_bytes()
        return data

    def _sync(self, work: Any) -> Any:
        import icechunk
        from zarr.core.sync import sync

        try:
            return sync(work)
        except icechunk.IcechunkError as error:
            raise RunError(f"cannot read {self.address}: {in_words(error)}.") from error


class VersionView(SnapshotView):
    """The visible snapshots at one point of a repository's history, without attempts that started later."""

    def __init__(self, run: Path, store: IcechunkTensorStore, *, attempt: int | None = None) -> None:
        super().__init__(run, store, attempt=attempt)
        self._repository = store

    @property
    def branches(self) -> list[str]:
        return self._repository.branches

    @property
    def tags(self) -> list[str]:
        return self._repository.tags

    def history(self) -> Iterator[Commit]:
        """The commits that led here, newest first."""
        return self._repository.history()

    def _viewed(self, attempts: list[int]) -> int | None:
        last = max(attempts, default=0)
        return last if self._view is None else min(self._view, last)


def _open(address: Address) -> Any:
    storage = icechunk_storage(address)
    import icechunk

    try:
        return icechunk.Repository.open(storage)
    except icechunk.IcechunkError as error:
        raise RunError(f"cannot open {address}: {in_words(error)}.") from error
