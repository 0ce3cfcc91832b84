"""Snapshots in an Icechunk repository in the run folder: every snapshot a commit, with history, tags and branches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sonde.schema.snapshots.addresses import local_address
from sonde.write.tensors.spooled import OPTIONS, SpooledStore

__all__ = ["OPTIONS", "open"]


def open(run: Path, *, rank: int = 0, branch: str = "main", keep_local: bool = False, **options: Any) -> SpooledStore:
    """The run's `icechunk/`. A snapshot is acknowledged when it is in `tensors/`, and is moved from there in the
    background."""
    return SpooledStore(run, local_address(run), rank=rank, branch=branch, keep_local=keep_local, **options)
