"""Every byte of every snapshot on this disk, looked at: what is not as it was written, in words."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

from sonde.errors import RunError
from sonde.read.run.catalog import snapshot_details
from sonde.read.run.folder import open_inside
from sonde.read.tensors.lake import FolderLake, Lake, open_lake, upload_state
from sonde.schema.addresses import read_address


def damaged_snapshots(run: Path, *, is_live: bool) -> list[str]:
    """One sentence for each snapshot that cannot be read whole. What is in a bucket is not fetched for this."""
    written = snapshot_details(run, "sha256", is_live=is_live)
    try:
        lake = _lake_on_disk(run)
        return [problem for step in lake.steps for problem in _problems(run, lake, step, written.get(step))]
    except RunError as error:
        return [f"the snapshots cannot be read: {error}"]


def _lake_on_disk(run: Path) -> Lake:
    state = upload_state(run)
    is_here = state is None or read_address(state.url, run).is_local
    return open_lake(run) if is_here else FolderLake(run)


def _problems(run: Path, lake: Lake, step: int, sha256: str | None) -> Iterator[str]:
    """At most one: a snapshot with a damaged tensor is damaged."""
    path = FolderLake(run).path(step)
    try:
        if sha256 and path.exists() and lake.document(step).sha256 != sha256:
            yield f"the document of the snapshot of step {step} is not the one that was acknowledged"
            return
        for name in lake.entries(step):
            lake.read(step, name)
        if path.is_file() and (damaged := _damaged_entry(run, path)):
            yield f"the snapshot of step {step}: {damaged} in {path.name} is damaged. sonde reads it; others cannot."
    except RunError as error:
        yield f"the snapshot of step {step}: {error}"
    except OSError as error:
        yield f"the snapshot of step {step} cannot be read: {error}"


def _damaged_entry(run: Path, path: Path) -> str | None:
    """The first entry whose checksum does not match: also of those that only other Zarr readers look at."""
    with open_inside(run, str(path.relative_to(run))) as file, zipfile.ZipFile(file) as archive:
        try:
            return archive.testzip()
        except zipfile.BadZipFile as error:
            return str(error)
