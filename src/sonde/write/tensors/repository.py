"""An Icechunk repository of snapshots: one commit per snapshot. For the uploader's process only.

icechunk hangs in a forked child and must not be imported in the training process. The entries of a snapshot's file are
put into the repository unchanged: the same chunks, the same checksums, read back by the same code.
"""

from __future__ import annotations

import asyncio
import time
import zipfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from sonde.errors import RunError, UsageError
from sonde.schema.snapshots.addresses import Address, icechunk_storage
from sonde.schema.snapshots.document import SnapshotDocument
from sonde.schema.snapshots.tensors import (
    GROUP_FILE,
    SnapshotKey,
    attempt_of,
    group_name,
    older_group,
    parent_name,
    step_of,
)
from sonde.write.durable import make_folder
from sonde.write.lock import RunLock

_ROOT: Final = b'{"zarr_format": 3, "node_type": "group", "attributes": {"sonde": {"format": 1}}}'
_AT_ONCE: Final = 16
_REBASE_TRIES: Final = 1000
_OPEN_TRIES: Final = 10
_BEING_MADE: Final = ("clean prefixes", "updated by other session")
"""Messages of icechunk when two writers create the same repository at once."""

Tick = Callable[[], None]


class Repository:
    """One writer of a repository. On a local disk it is the only one: there, two commits at once lose one of them."""

    def __init__(self, address: Address, *, rank: int = 0, branch: str = "main", tick: Tick = lambda: None) -> None:
        self.address, self._rank, self._branch, self._tick = address, rank, branch, tick
        self._lock: RunLock | None = None
        if address.is_local:
            beside = Path(address.bucket).parent  # icechunk needs its own folder to be empty at first
            make_folder(beside)
            self._lock = RunLock(beside, patience_s=0.0)
        try:
            self._repository = self._open()
            self._make_root()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    # -------------------------------------------------------------------------------------------------------- snapshots

    def commit(self, key: SnapshotKey, path: Path) -> str:
        """Put a snapshot's file into the repository; returns its commit, also if an earlier attempt made it."""
        group = self._group(key)
        while True:
            session = self._repository.writable_session(self._branch)
            if _run(session.store.exists(f"{group}/{GROUP_FILE}")):
                return self.commit_of(*key) or self._newest()
            with zipfile.ZipFile(path) as archive:
                _run(self._put_all(session, key, archive))
                document = SnapshotDocument.from_bytes(archive.read(GROUP_FILE), str(path))
            metadata = {**self._metadata(key), "reason": document.reason, "num": len(document.tensors)}
            commit = self._commit(session, str(key), metadata)
            if commit is not None:
                return commit

    def keys(self) -> list[SnapshotKey]:
        """The snapshots on the branch, in the order of their attempts."""
        keys: list[SnapshotKey] = _run(self._keys(self._reading()))
        return keys

    def commit_of(self, attempt: int | None, step: int) -> str | None:
        """The newest commit that added a step, in any attempt or in this one; None if there never was one, or it has
        expired."""
        for info in self._repository.ancestry(branch=self._branch):
            known = info.metadata
            is_step = known.get("step") == step and known.get("rank", 0) == self._rank
            if is_step and attempt in (None, known.get("attempt", 0)):
                return str(info.id)
        return None

    def fetch(self, key: SnapshotKey, path: Path, *, is_base: bool = False) -> None:
        """Copy a snapshot to a file, as it was in the spool. `is_base`: also a deleted one, see `older_group`."""
        _run(self._fetch(self._reading(), key, path, is_base=is_base))

    def delete(self, key: SnapshotKey) -> None:
        """Delete a snapshot in one commit. In a repository of an earlier version, one that others are stored as a
        difference from is refused."""
        metadata = self._metadata(key)
        metadata["deleted"] = metadata.pop("step")
        while True:
            session = self._repository.writable_session(self._branch)
            if not _run(self._delete(session, key)):
                return
            if self._commit(session, f"delete {key}", metadata) is not None:
                return

    # ---------------------------------------------------------------------------------------------------------- history

    def tag(self, name: str, step: int | None = None, attempt: int | None = None) -> str:
        """Tag the current state, or the state when a step was added. A tag is set once and never moves."""
        if name in self._repository.list_tags():
            raise UsageError(f'the tag "{name}" already exists, and tags never move. Choose another name.')
        commit = self._commit_at(step, attempt)
        self._repository.create_tag(name, commit)
        return commit

    def create_branch(self, name: str, step: int | None = None, attempt: int | None = None) -> str:
        """Create a branch from the current state, or from the state when a step was added."""
        if name in self._repository.list_branches():
            raise UsageError(f'the branch "{name}" already exists. Choose another name.')
        commit = self._commit_at(step, attempt)
        self._repository.create_branch(name, commit)
        return commit

    def reset_branch(self, name: str, step: int | None = None, tag: str | None = None) -> str:
        """Move a branch back to the commit of a step, or of a tag."""
        if name not in self._repository.list_branches():
            known = ", ".join(sorted(self._repository.list_branches()))
            raise UsageError(f'no branch "{name}". Known: {known}.')
        if name == self._branch:
            raise UsageError(
                f'"{name}" is the branch that the snapshots of this run were acknowledged on. Create another one at '
                "the earlier step:  create_branch(name, step)."
            )
        if (step is None) == (tag is None):
            raise UsageError("reset_branch() needs a step or a tag, and not both.")
        if tag is not None and tag not in self._repository.list_tags():
            raise UsageError(f'no tag "{tag}". Known: {", ".join(sorted(self._repository.list_tags())) or "none"}.')
        commit = self._commit_at(step, None) if tag is None else str(self._repository.lookup_tag(tag))
        self._repository.reset_branch(name, commit)
        return commit

    def history(self) -> list[dict[str, Any]]:
        """Every commit of the branch, newest first."""
        return [
            {"id": info.id, "message": info.message, "time": info.written_at.timestamp(), "metadata": info.metadata}
            for info in self._repository.ancestry(branch=self._branch)
        ]

    def expire(self, older_than: datetime) -> int:
        """Delete commits before a time (their contents stay if still in use), and free unused space.

        Nothing newer than that time is freed: the parts of an upload in progress belong to no commit yet.
        """
        num = len(self._repository.expire_snapshots(older_than))
        self._repository.garbage_collect(older_than)
        return num

    # -------------------------------------------------------------------------------------------------------- internals

    def _newest(self) -> str:
        return str(self._repository.lookup_branch(self._branch))

    def _group(self, key: SnapshotKey) -> str:
        return group_name(key.step, self._rank, key.attempt)

    def _metadata(self, key: SnapshotKey) -> dict[str, Any]:
        known = {"step": key.step, "rank": self._rank}
        return {**known, "attempt": key.attempt} if key.attempt else known

    def _commit_at(self, step: int | None, attempt: int | None) -> str:
        """The commit for a tag or a branch. Never any state other than the requested one: a tag is permanent."""
        if step is None:
            return self._newest()
        commit = self.commit_of(attempt, step)
        if commit is None:
            steps = sorted({key.step for key in self.keys() if attempt in (None, key.attempt)})
            why = "Its commit has expired" if step in steps else f"Available: {steps}"
            raise RunError(f"no commit contains {SnapshotKey(attempt or 0, step)}. {why}.")
        return commit

    def _open(self) -> Any:
        storage = icechunk_storage(self.address)
        import icechunk

        config = icechunk.RepositoryConfig.default()
        config.storage = icechunk.StorageSettings(
            retries=icechunk.StorageRetriesSettings(max_tries=3, initial_backoff_ms=100, max_backoff_ms=1000)
        )
        for _ in range(_OPEN_TRIES):
            try:
                return icechunk.Repository.open_or_create(storage, config=config)
            except icechunk.IcechunkError as error:
                if not any(words in str(error) for words in _BEING_MADE):
                    raise
                time.sleep(0.3)  # another writer is creating it at this moment
        raise RunError(
            f"{self.address} is not empty and not a repository: its creation was interrupted. "
            "Delete its contents and try again."
        )

    def _make_root(self) -> None:
        """Create the groups above the snapshots; another writer may be creating the same root at the same time."""
        keys = [GROUP_FILE]
        if self._rank:
            keys.append(f"{parent_name(self._rank)}/{GROUP_FILE}")
        while True:
            session = self._repository.writable_session(self._branch)
            missing = [key for key in keys if not _run(session.store.exists(key))]
            if not missing:
                return
            for key in missing:
                _run(_put(session, key, _ROOT))
            if self._commit(session, "begin", {}) is not None:
                return

    def _commit(self, session: Any, message: str, metadata: dict[str, Any]) -> str | None:
        """None: another writer changed the same thing; read again and retry."""
        import icechunk

        try:
            commit = session.commit(
                message, metadata, rebase_with=icechunk.ConflictDetector(), rebase_tries=_REBASE_TRIES
            )
        except (icechunk.ConflictError, icechunk.RebaseFailedError):
            return None
        self._tick()
        return str(commit)

    def _reading(self) -> Any:
        return self._repository.readonly_session(self._branch)

    async def _put_all(self, session: Any, key: SnapshotKey, archive: zipfile.ZipFile) -> None:
        """Documents first, the group's before those in it: a chunk needs its array to exist."""
        group = self._group(key)
        parent = f"{parent_name(self._rank, key.attempt)}/{GROUP_FILE}"
        if key.attempt and not await session.store.exists(parent):
            await _put(session, parent, _ROOT)
        documents = [key for key in archive.namelist() if key.endswith(GROUP_FILE)]
        for name in sorted(documents, key=lambda name: name.count("/")):
            await _put(session, f"{group}/{name}", archive.read(name))
        limit = asyncio.Semaphore(_AT_ONCE)

        async def put(name: str) -> None:
            async with limit:
                await _put(session, f"{group}/{name}", await asyncio.to_thread(archive.read, name))
                self._tick()

        await asyncio.gather(*[put(name) for name in archive.namelist() if not name.endswith(GROUP_FILE)])

    async def _keys(self, session: Any) -> list[SnapshotKey]:
        root = await self._names(session, 0)
        keys = [SnapshotKey(0, step) for step in map(step_of, root) if step is not None]
        for attempt in (attempt for attempt in map(attempt_of, root) if attempt is not None):
            names = await self._names(session, attempt)
            keys += [SnapshotKey(attempt, step) for step in map(step_of, names) if step is not None]
        return sorted(keys)

    async def _names(self, session: Any, attempt: int) -> list[str]:
        return [name.strip("/") async for name in session.store.list_dir(parent_name(self._rank, attempt))]

    async def _fetch(self, session: Any, key: SnapshotKey, path: Path, *, is_base: bool) -> None:
        group = self._group(key)
        if is_base and await session.store.exists(f"{older_group(group)}/{GROUP_FILE}"):
            group = older_group(group)
        elif not await session.store.exists(f"{group}/{GROUP_FILE}"):
            raise RunError(f"{self.address} has no snapshot of {key}.")
        with zipfile.ZipFile(path, "w") as archive:
            async for name in session.store.list_prefix(f"{group}/"):
                archive.writestr(name.removeprefix(f"{group}/"), await _get(session, name))
                self._tick()

    async def _delete(self, session: Any, key: SnapshotKey) -> bool:
        """False: there was nothing to delete."""
        keys = await self._keys(session)
        if key not in keys:
            return False
        for other in (other for other in keys if other.attempt == key.attempt == 0):
            group = self._group(other)
            document = SnapshotDocument.from_bytes(await _get(session, f"{group}/{GROUP_FILE}"), group)
            if key.step in document.bases:
                raise RunError(
                    f"cannot delete the snapshot of {key}: an earlier version of sonde stored {other} as a "
                    f"difference from it. Delete {other} first."
                )
        await session.store.delete_dir(self._group(key))
        return True


def _run(work: Any) -> Any:
    return asyncio.run(_awaited(work))


async def _awaited(work: Any) -> Any:
    return await work


async def _put(session: Any, key: str, data: bytes) -> None:
    from zarr.core.buffer.cpu import Buffer

    await session.store.set(key, Buffer.from_bytes(data))


async def _get(session: Any, key: str) -> bytes:
    from zarr.core.buffer import default_buffer_prototype

    found = await session.store.get(key, default_buffer_prototype())
    if found is None:
        raise RunError(f"{key} is missing from the repository.")
    data: bytes = found.to_bytes()
    return data
