"""Tables <-> Parquet segments: tiles as row groups, encodings by column, a checksum on every page. Knows no folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sonde.schema.sketch import COUNTS, FIELDS, INDEX, MAX, MIN, NUM_BINS, NUM_FIELDS, PAIRED, SUMSQ_RAW, Array
from sonde.schema.thinning import group_starts
from sonde.write.stats.table import Int32, Int64, ScalarsTable, StatsTable

TILE_ROWS: Final = 32_768
MIN_TILE_SITES: Final = 32
"""A tile is about 1,024 steps of 32 sites; a segment of fewer steps has more sites per tile, not more tiles."""

_ABSENT_AS_NAN: Final = (SUMSQ_RAW, *(INDEX[name] for name in PAIRED))
_HIST_LEAF: Final = "hist.list.element"

Facts = dict[str, int | str]

STATS_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("site", pa.int32()),
        *((name, pa.int64() if name in COUNTS else pa.float64()) for name in FIELDS),
        ("hist", pa.list_(pa.float32())),
        ("time", pa.float64()),
    ]
)
SCALARS_SCHEMA: Final = pa.schema(
    [
        ("step", pa.int64()),
        ("name", pa.int32()),
        ("time", pa.float64()),
        ("value", pa.float64()),
        ("counted", pa.int64()),
    ]
)


class Sink(Protocol):
    """A file object for the bytes, as pyarrow expects it."""

    closed: bool

    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...


def write_stats(sink: Sink, table: StatsTable, facts: Facts) -> str:
    """Write a segment of sketches; returns the bounds of its tiles. `facts`, kept in it, allow a lost catalog to be
    rebuilt."""
    bounds = list(tile_bounds(table.site))
    batches = (_stats_batch(table, start, end) for start, end in bounds)
    split = [*(name for name in FIELDS if name not in COUNTS), _HIST_LEAF]
    _write(sink, STATS_SCHEMA, batches, ["step", "site", "time", *COUNTS], split, facts)
    return _tiles(table.site, table.step, bounds)


def write_scalars(sink: Sink, table: ScalarsTable, facts: Facts) -> str:
    """Write a segment of scalars; returns the bounds of its tiles."""
    bounds = list(tile_bounds(table.name))
    batches = (_scalars_batch(table, start, end) for start, end in bounds)
    _write(sink, SCALARS_SCHEMA, batches, ["step", "name", "counted"], ["time", "value"], facts)
    return _tiles(table.name, table.step, bounds)


def _scalars_batch(table: ScalarsTable, start: int, end: int) -> Any:
    columns = [_column(part[start:end]) for part in (table.step, table.name, table.time, table.value)]
    if table.counted is None:
        counted = pa.nulls(end - start, pa.int64())
    else:
        made, step = table.counted[start:end], table.step[start:end]
        counted = _column(made, made >= step)
    return pa.record_batch([*columns, counted], schema=SCALARS_SCHEMA)


def read_stats(path: Path) -> StatsTable:
    """Read a segment of sketches and check its pages."""
    table = pq.read_table(path, page_checksum_verification=True, use_threads=False)
    rows = np.empty((len(table), NUM_FIELDS))
    for index, name in enumerate(FIELDS):
        rows[:, index] = table[name].to_numpy()
    rows[np.isnan(rows[:, MIN]), MIN] = np.inf
    rows[np.isnan(rows[:, MAX]), MAX] = -np.inf
    hists = table["hist"].combine_chunks()
    return StatsTable(
        table["site"].to_numpy(),
        table["step"].to_numpy(),
        table["time"].to_numpy(),
        rows,
        np.flatnonzero(hists.is_valid().to_numpy(zero_copy_only=False)).astype(np.int64),
        hists.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, NUM_BINS),
    )


def tile_bounds(site: Int32) -> Iterator[tuple[int, int]]:
    """(start, end) of each row group: whole sites."""
    starts = group_starts(site)
    if not len(starts):
        return
    rows_per_site = max(len(site) // len(starts), 1)
    num_sites = max(TILE_ROWS // rows_per_site, MIN_TILE_SITES)
    edges = [*(int(start) for start in starts[::num_sites]), len(site)]
    yield from itertools.pairwise(edges)


def _tiles(site: Int32, step: Int64, bounds: list[tuple[int, int]]) -> str:
    return json.dumps(
        [[int(site[a]), int(site[b - 1]), int(step[a:b].min()), int(step[a:b].max())] for a, b in bounds],
        separators=(",", ":"),
    )


def _stats_batch(table: StatsTable, start: int, end: int) -> Any:
    columns = np.ascontiguousarray(table.rows[start:end].T)
    return pa.record_batch(
        [
            _column(table.step[start:end]),
            _column(table.site[start:end]),
            *(_field(columns[index], index, name) for index, name in enumerate(FIELDS)),
            _hists(table, start, end),
            _column(table.time[start:end]),
        ],
        schema=STATS_SCHEMA,
    )


def _field(column: Array, index: int, name: str) -> Any:
    if name in COUNTS:
        with np.errstate(invalid="ignore"):
            return _column(column.astype(np.int64))
    if index in _ABSENT_AS_NAN:
        return _nullable(column, np.isnan(column))
    if index in (MIN, MAX):
        return _nullable(column, np.isinf(column))
    return _column(column)


def _column(values: NDArray[Any], is_absent: NDArray[np.bool_] | None = None) -> Any:
    """The array without a copy. `pa.array` would import pandas first, to check for a Series."""
    buffers = [_validity(is_absent), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def _validity(is_absent: NDArray[np.bool_] | None) -> Any:
    return None if is_absent is None else pa.py_buffer(np.packbits(~is_absent, bitorder="little"))


def _nullable(column: Array, is_absent: NDArray[np.bool_]) -> Any:
    return pa.nulls(len(column), pa.float64()) if is_absent.all() else _column(column, is_absent)


def _hists(table: StatsTable, start: int, end: int) -> Any:
    first, last = np.searchsorted(table.hist_row, [start, end])
    if first == last:
        return pa.nulls(end - start, pa.list_(pa.float32()))
    lengths = np.zeros(end - start, np.int32)
    lengths[table.hist_row[first:last] - start] = NUM_BINS
    offsets = np.zeros(end - start + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = _column(np.ascontiguousarray(table.hist[first:last]).reshape(-1))
    buffers = [_validity(lengths == 0), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.list_(pa.float32()), len(lengths), buffers, children=[values])


def _write(
    sink: Sink, schema: Any, batches: Iterator[Any], dictionary: list[str], split: list[str], facts: Facts
) -> None:
    schema = schema.with_metadata({"sonde": json.dumps(facts)})
    with pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        schema,
        version="2.6",
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,
        column_encoding=dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        write_statistics=dictionary[:2],
        write_page_checksum=True,
    ) as writer:
        for batch in batches:
            writer.write_table(pa.Table.from_batches([batch], schema), row_group_size=len(batch))
