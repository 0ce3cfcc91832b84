"""Snapshots in the run folder, each a Zarr v3 group in one file that any Zarr reader opens. The default."""

from __future__ import annotations

from pathlib import Path

from sonde.write.tensors.local import LocalStore


def open(run: Path, *, rank: int = 0, compression: str = "auto", keep_mantissa_bits: int | None = None) -> LocalStore:
    """The run's `tensors/`. Lossless unless `keep_mantissa_bits` is given; `compression`: auto, none, zstd or lz4."""
    return LocalStore(run, rank=rank, compression=compression, keep_mantissa_bits=keep_mantissa_bits)
