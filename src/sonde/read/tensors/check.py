"""Verification of every byte of every snapshot on this disk."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from sonde.errors import RunError
from sonde.read.run.catalog import read_snapshot_rows
from sonde.read.run.folder import open_inside
from sonde.read.tensors.readers import TensorStore
from sonde.read.tensors.stores import FolderSource, FolderTensorStore, SpooledSource, upload_state
from sonde.read.tensors.view import Source
from sonde.schema.snapshots.addresses import read_address
from sonde.schema.snapshots.tensors import SnapshotKey


def damaged_snapshots(run: Path, *, is_live: bool) -> list[str]:
    """One sentence for each damaged snapshot, of all attempts. Snapshots in a bucket are not downloaded for this."""
    written = {row.place: row.details.get("sha256") for row in read_snapshot_rows(run, is_live=is_live)}
    try:
        source = _source_on_disk(run)
        places = [(source.store(attempt), attempt) for attempt in source.attempts()]
        found = [(store, SnapshotKey(attempt, step)) for store, attempt in places for step in store.steps]
        return [problem for store, key in found for problem in _problems(run, store, key, written.get(key))]
    except RunError as error:
        return [f"cannot read the snapshots: {error}"]


def _source_on_disk(run: Path) -> Source:
    state = upload_state(run)
    if state is None or not (address := read_address(state.url, run)).is_local:
        return FolderSource(run)
    from sonde.read.tensors.icechunk import IcechunkTensorStore

    return SpooledSource(run, 0, lambda: IcechunkTensorStore(address, branch=state.branch))


def _problems(run: Path, store: TensorStore, key: SnapshotKey, sha256: object) -> Iterator[str]:
    """The first problem of a snapshot, if any."""
    path, step = FolderTensorStore(run, attempt=key.attempt).path(key.step), key.step
    try:
        if sha256 and path.exists() and store.document(step).sha256 != sha256:
            yield f"the document of the snapshot of {key} differs from the one that was acknowledged"
            return
        for name in store.entries(step):
            store.read(step, name)
        if path.is_file() and (damaged := _damaged_entry(run, path)):
            yield (
                f"the snapshot of {key}: {damaged} in {path.name} is damaged. "
                "sonde can still read it; other programs cannot."
            )
    except RunError as error:
        yield f"the snapshot of {key}: {error}"
    except OSError as error:
        yield f"cannot read the snapshot of {key}: {error}"


def _damaged_entry(run: Path, path: Path) -> str | None:
    """The first entry whose checksum does not match, including entries that only other Zarr readers use."""
    with open_inside(run, str(path.relative_to(run))) as file, zipfile.ZipFile(file) as archive:
        try:
            return archive.testzip()
        except zipfile.BadZipFile as error:
            return str(error)
