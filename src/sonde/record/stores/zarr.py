"""Snapshots in the run folder, as a Zarr v3 hierarchy that any Zarr reader opens. The default."""

from __future__ import annotations

from pathlib import Path

from sonde.record.local_lake import LocalLake


def open(
    run: Path,
    *,
    rank: int = 0,
    compression: str = "auto",
    keep_mantissa_bits: int | None = None,
    delta_mib: float = 512.0,
) -> LocalLake:
    """The run's `tensors/`. Lossless unless `keep_mantissa_bits` is given; `compression`: auto, none, zstd or lz4.

    `delta_mib` is the memory that may hold the last snapshot, to write the next one as the difference; 0: never.
    """
    return LocalLake(
        run, rank=rank, compression=compression, keep_mantissa_bits=keep_mantissa_bits, delta_mib=delta_mib
    )
