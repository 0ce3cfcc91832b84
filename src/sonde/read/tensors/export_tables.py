"""Reading of tables that `sonde export` wrote as HDF5, Parquet or Arrow, with their original names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sonde.errors import UsageError
from sonde.read.tensors.files.hdf5 import open_file
from sonde.schema.snapshots.exported import require_h5py

_KEYS = {"stats": ("kind", "site", "stat"), "scalars": ("name",)}


def open_export_tables(path: str | os.PathLike[str]) -> dict[str, pa.Table]:
    """The tables of an exported file or folder, by name.

    open_export_tables("run.h5")["scalars"].to_pandas()
    """
    found = Path(path)
    if found.is_dir():
        files = sorted(file for file in found.iterdir() if file.suffix in (".parquet", ".arrow"))
        return {name: table for file in files for name, table in open_export_tables(file).items()}
    if found.exists() and not found.is_file():
        raise UsageError(f"{found} is not a regular file, so it is not read.")
    if found.suffix == ".parquet":
        return {found.stem: pq.read_table(found, page_checksum_verification=True)}
    if found.suffix == ".arrow":
        with pa.memory_map(str(found)) as file:
            return {found.stem: pa.ipc.open_file(file).read_all()}
    if found.suffix in (".h5", ".hdf5"):
        with open_file(found) as file:
            return {name: _table(group, _KEYS.get(name, ())) for name, group in file.items()}
    raise UsageError(f"cannot read tables from {found}. Give a .h5, .parquet or .arrow file, or a folder of them.")


def _table(group: Any, keys: tuple[str, ...]) -> pa.Table:
    """Series from nested groups in one table, with their names as the first columns."""
    tables = []
    for labels, inner in _series(group, len(keys)):
        columns = {column: _column(inner[column]) for column in inner}
        num_rows = len(next(iter(columns.values()), []))
        named = {key: pa.array([label] * num_rows, pa.string()) for key, label in zip(keys, labels, strict=True)}
        tables.append(pa.table({**named, **columns}))
    return pa.concat_tables(tables) if tables else pa.table({})


def _series(group: Any, depth: int, labels: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if depth == 0:
        yield labels, group
        return
    for name in group:
        inner = group[name]
        yield from _series(inner, depth - 1, (*labels, str(inner.attrs.get("name", name))))


def _column(dataset: Any) -> pa.Array:
    if require_h5py().check_string_dtype(dataset.dtype) is not None:
        return pa.array(dataset.asstr()[:].tolist(), pa.string())
    return pa.array(np.asarray(dataset[:]))
