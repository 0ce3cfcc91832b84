"""Tables as files, written piece by piece: JSON, CSV, Parquet (with page checksums), Arrow IPC (Feather) or HDF5.

An HDF5 file has `/stats/<kind>/<site>/<stat>/{step,value}` and `/scalars/<name>/{step,value,…}`. Names that HDF5 cannot
represent are percent-encoded; every group has its original name in the attribute `name`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from sonde.schema.names import site_name
from sonde.schema.records import to_json
from sonde.schema.snapshots.exported import require_h5py
from sonde.show.export.source import Source


def write_table(path: Path, format: str, source: Source, facts: dict[str, Any]) -> None:
    """Write rows in order. In Parquet and Arrow the description of the run is in the metadata, under `sonde`."""
    pieces = source.pieces()
    first = next(pieces)
    schema = first.schema if format == "csv" else first.schema.with_metadata({"sonde": to_json(facts)})
    with _writer(path, format, schema) as writer:
        for piece in chain([first], pieces):
            writer.write_table(piece.cast(schema))


@contextmanager
def _writer(path: Path, format: str, schema: pa.Schema) -> Iterator[Any]:
    if format == "csv":  # non-finite numbers are written as `nan`, `inf` and `-inf`
        with pa_csv.CSVWriter(str(path), schema) as writer:
            yield writer
    elif format == "parquet":
        with pq.ParquetWriter(str(path), schema, compression="zstd", write_page_checksum=True) as writer:
            yield writer
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema, options=options) as writer:
            yield writer


def write_json(path: Path, sources: Sequence[Source], facts: dict[str, Any]) -> None:
    """Write `{"run": {…}, "scalars": [{…}, …], …}`; non-finite numbers are the strings "nan", "inf" and "-inf"."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"run": {to_json(facts)}')
        for source in sources:
            file.write(f',\n"{source.name}": [')
            separator = "\n"
            for piece in source.pieces():
                for batch in piece.to_batches(max_chunksize=10_000):
                    for row in batch.to_pylist():
                        file.write(f"{separator}{to_json(row)}")
                        separator = ",\n"
            file.write("]")
        file.write("}\n")


def write_hdf5(path: Path, sources: Sequence[Source], facts: dict[str, Any]) -> None:
    """Write one file, with the description of the run in its attributes."""
    with require_h5py().File(path, "w") as file:
        for key, value in facts.items():
            file.attrs[key] = value if isinstance(value, str | int) else to_json(value)
        for source in sources:
            group = file.create_group(source.name)
            for piece in source.pieces():
                _write_piece(group, source.name, piece)


def _write_piece(group: Any, name: str, table: pa.Table) -> None:
    keys = {"stats": ("kind", "site", "stat"), "scalars": ("name",)}.get(name)
    if keys is None:
        _write_columns(group, table, table.column_names)
        return
    values = [column for column in table.column_names if column not in keys]
    for labels, rows in _series(table, keys):
        inner = group
        for label in labels:
            inner = inner.require_group(_h5_name(label))
            inner.attrs["name"] = label
        _write_columns(inner, rows, values)


def _series(table: pa.Table, keys: Sequence[str]) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """Ranges of consecutive rows with equal keys."""
    labels = list(zip(*(table[key].to_pylist() for key in keys), strict=True))
    start = 0
    for end in range(1, len(labels) + 1):
        if end == len(labels) or labels[end] != labels[start]:
            yield labels[start], table.slice(start, end - start)
            start = end


def _write_columns(group: Any, table: pa.Table, columns: Sequence[str]) -> None:
    for column in columns:
        values = table[column].combine_chunks()
        if pa.types.is_string(values.type):
            group.create_dataset(
                column, data=np.array(values.to_pylist(), dtype=object), dtype=require_h5py().string_dtype()
            )
        else:
            group.create_dataset(column, data=values.to_numpy(zero_copy_only=False))


def _h5_name(name: str) -> str:
    """Encode a name: HDF5 splits on "/", and treats "." and the empty name as the group itself."""
    safe = site_name(name)
    return {"": "%", ".": "%2E"}.get(safe, safe)
