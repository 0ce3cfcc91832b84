"""Snapshots in an S3, Google or Azure bucket: an Icechunk repository for each run, filled from the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sonde.errors import UsageError
from sonde.schema.snapshots.addresses import Address, check_environment
from sonde.write.tensors.spooled import OPTIONS, SpooledStore

__all__ = ["OPTIONS", "open"]


def open(
    run: Path, *, url: str = "", rank: int = 0, branch: str = "main", keep_local: bool = True, **options: Any
) -> SpooledStore:
    """`url` is s3://bucket/prefix, gs://… or az://…; credentials come from the environment."""
    if not url:
        raise UsageError('no bucket given. Pass one: store="s3://bucket/prefix".')
    address = Address.parse(url)
    check_environment(address)
    return SpooledStore(run, address.for_run(run), rank=rank, branch=branch, keep_local=keep_local, **options)
