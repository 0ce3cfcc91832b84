"""Snapshots in the run folder, each a Zarr v3 group in one file that any Zarr reader opens. The default."""

from __future__ import annotations

from pathlib import Path

from sonde.write.tensors.archive_file import CHUNK_MIB
from sonde.write.tensors.codecs import Compression
from sonde.write.tensors.local import LocalStore


def open(
    run: Path,
    *,
    rank: int = 0,
    compression: Compression = "auto",
    chunk_mib: float = CHUNK_MIB,
    keep_mantissa_bits: int | None = None,
) -> LocalStore:
    """The run's `tensors/`. Lossless unless `keep_mantissa_bits` is given; `compression`: auto, none, zstd or lz4, with
    a level as in `zstd:5`, or such a text for each kind."""
    return LocalStore(
        run, rank=rank, compression=compression, chunk_mib=chunk_mib, keep_mantissa_bits=keep_mantissa_bits
    )
