"""Tables as they are sealed: sorted by (site, step), as numpy columns. No I/O and no Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sonde.schema.records import ScalarsRecord, StatsRecord
from sonde.schema.sketch import NUM_BINS, NUM_FIELDS, Array

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class StatsTable:
    """Sketches sorted by (site, step). `hist` rows belong to the table's rows at `hist_row`, which ascends."""

    site: Int32
    step: Int64
    time: Array
    rows: Array
    hist_row: Int64
    hist: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.site)


@dataclass(slots=True)
class ScalarsTable:
    """Scalars sorted by (name, step)."""

    name: Int32
    step: Int64
    time: Array
    value: Array
    counted: Int64 | None = None
    """The current step at the time, if some rows are logged ahead of it."""

    def __len__(self) -> int:
        return len(self.name)


def sort_stats(records: Sequence[StatsRecord]) -> StatsTable:
    """Sort the rows of many records.

    Rows are moved once, from each record to their place: an unsorted table of all rows would double the memory.
    """
    counts = np.array([len(record.site_ids) for record in records], np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    site = np.concatenate([record.site_ids for record in records])
    step = np.repeat(np.array([record.step for record in records], np.int64), counts)
    order = sorting_order(site, step)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    time = np.repeat(np.array([record.time for record in records], np.float64), counts)
    rows = np.empty((len(order), NUM_FIELDS))
    hist_rows = []
    for record, start, end in zip(records, starts[:-1], starts[1:], strict=True):
        rows[place[start:end]] = record.rows
        if len(record.hist_index):
            hist_rows.append(place[start + record.hist_index])
    hist_row, hist = _sort_hists(records, hist_rows)
    return StatsTable(site[order], step[order], time[order], rows, hist_row, hist)


def join_stats(tables: Sequence[StatsTable]) -> StatsTable:
    """Merge sorted tables into one sorted table."""
    if len(tables) == 1:
        return tables[0]
    starts = np.cumsum([0, *(len(table) for table in tables)])
    site = np.concatenate([table.site for table in tables])
    step = np.concatenate([table.step for table in tables])
    is_in_order = all(a.step.max() <= b.step.min() for a, b in pairwise(tables))
    order = np.argsort(_narrow(site), kind="stable") if is_in_order else np.lexsort((step, site))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    hist_row = place[np.concatenate([table.hist_row + start for table, start in zip(tables, starts, strict=False)])]
    hist_order = np.argsort(hist_row, kind="stable")
    return StatsTable(
        site[order],
        step[order],
        np.concatenate([table.time for table in tables])[order],
        np.concatenate([table.rows for table in tables])[order],
        hist_row[hist_order].astype(np.int64),
        np.concatenate([table.hist for table in tables])[hist_order],
    )


def sort_scalars(records: Sequence[ScalarsRecord]) -> ScalarsTable:
    name = np.concatenate([record.name_ids for record in records])
    step = np.concatenate([record.steps for record in records])
    order = sorting_order(name, step)
    time = np.concatenate([record.times for record in records])
    value = np.concatenate([record.values for record in records])
    is_ahead = any(record.counted is not None for record in records)
    counted = np.concatenate([record.made_at for record in records])[order] if is_ahead else None
    return ScalarsTable(name[order], step[order], time[order], value[order], counted)


def sorting_order(site: Int32, step: Int64) -> NDArray[np.intp]:
    """The stable order by (site, step). Steps mostly come in order, and then small ids are sorted in linear time."""
    if len(step) > 1 and not (step[1:] >= step[:-1]).all():
        return np.lexsort((step, site))
    return np.argsort(_narrow(site), kind="stable")


def _narrow(site: Int32) -> NDArray[np.int32] | NDArray[np.uint16]:
    """Sixteen bits are sorted by radix, in linear time."""
    return site.astype(np.uint16) if len(site) and site.min() >= 0 and site.max() < 1 << 16 else site


def _sort_hists(records: Sequence[StatsRecord], hist_rows: list[Int64]) -> tuple[Int64, NDArray[np.float32]]:
    if not hist_rows:
        return np.empty(0, np.int64), np.empty((0, NUM_BINS), np.float32)
    hist_row = np.concatenate(hist_rows)
    order = np.argsort(hist_row, kind="stable")
    hist = np.concatenate([record.hist for record in records if len(record.hist_index)])
    return hist_row[order], hist[order]
