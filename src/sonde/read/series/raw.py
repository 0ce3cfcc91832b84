"""Sketch rows of some sites, sealed and live: each recorded row once, with the parts of one sketch merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.catalog import Segment
from sonde.read.run.segments import damaged
from sonde.read.run.state import RunState
from sonde.read.run.steps import NO_STEPS, StepFilter
from sonde.schema.records import StatsRecord
from sonde.schema.sketch import FIELDS, HIST_N, NUM_BINS, SUMSQ, SUMSQ_RAW, Array, N, empty_rows, merge_groups
from sonde.schema.thinning import group_starts

Ids = NDArray[np.int64]
_EMPTY: Final = empty_rows()


@dataclass(frozen=True, slots=True)
class RawStats:
    """Parallel columns, sorted by (site, step), with one row for each pair. `hist` is None if not requested.

    `rows` is laid out by field. Fields that were not requested are never touched: they take no memory and have no
    values.
    """

    site: Ids
    step: NDArray[np.int64]
    rows: Array
    hist: NDArray[np.float32] | None

    def __len__(self) -> int:
        return len(self.site)

    def slice_of(self, site: int) -> slice:
        """The range of a site's rows."""
        return slice(int(np.searchsorted(self.site, site)), int(np.searchsorted(self.site, site, "right")))


def field_table(num_rows: int) -> Array:
    """Allocate rows by field; the system assigns memory only to fields that are written."""
    return np.zeros((len(FIELDS), num_rows)).T


def take_rows(rows: Array, index: NDArray[np.intp], fields: frozenset[int]) -> Array:
    if len(index) == len(rows):
        return rows
    taken = field_table(len(index))
    for field in fields:
        taken[:, field] = rows[index, field]
    return taken


def read_raw(
    state: RunState,
    sites: Ids,
    steps: StepFilter,
    fields: frozenset[int],
    *,
    with_hist: bool,
    segments: Sequence[Segment] | None = None,
    bucket: int = 1,
    with_live: bool = True,
) -> RawStats:
    """Read fields of sites. Damaged files are left out and reported; if nothing is left, an error is raised.

    `segments` defaults to all files with single steps; unsealed rows are included unless disabled; steps are merged
    by `bucket`.
    """
    sites = np.unique(sites)
    # Merging needs these: n identifies an empty part, and an absent raw sum means the sum itself.
    fields = fields | {N} | ({SUMSQ} if SUMSQ_RAW in fields else set()) | ({HIST_N} if with_hist else set())
    parts: list[RawStats] = []
    errors: list[CorruptError] = []
    for segment in state.segments_of("stats") if segments is None else segments:
        try:
            part = _read_segment(state, segment, sites, steps, fields, with_hist=with_hist)
        except CorruptError as error:
            state.damage[segment.name] = str(error)
            errors.append(error)
            continue
        if part is not None:
            parts.append(part)
    if with_live or not parts:
        live = steps if with_live else NO_STEPS
        parts.append(_from_frames(state, sites, live, with_hist=with_hist))
    if with_live and (summed := _from_sums(state, sites, steps, with_hist=with_hist)) is not None:
        parts.append(summed)
    raw = _combine(parts, fields, bucket, with_hist=with_hist)
    is_merged = bucket > 1 or any(segment.level for segment in segments or ())
    is_whole = state.is_whole(raw.site, raw.rows[:, N], is_merged=is_merged)
    if is_whole is not None and not is_whole.all():
        keep = np.flatnonzero(is_whole)
        hist = None if raw.hist is None else raw.hist[keep]
        raw = RawStats(raw.site[keep], raw.step[keep], take_rows(raw.rows, keep, fields), hist)
    if errors and not len(raw):
        raise errors[0]
    return raw


def _columns(fields: frozenset[int], *, with_hist: bool) -> list[str]:
    return ["step", "site", *(FIELDS[field] for field in sorted(fields)), *(["hist"] if with_hist else [])]


def _read_segment(
    state: RunState, segment: Segment, sites: Ids, steps: StepFilter, fields: frozenset[int], *, with_hist: bool
) -> RawStats | None:
    ids = state.ids_in(segment)
    wanted = sites if ids is None else ids.own(sites)
    table = state.segments.read(segment, "site", wanted, steps.span, _columns(fields, with_hist=with_hist))
    if table is None:
        return None
    try:
        site = _whole(table["site"])
        step = _whole(table["step"])
        keep = np.flatnonzero(is_in(site, wanted) & steps.mask(step))
        if ids is not None:
            site[keep] = ids.to_shown[site[keep]]
        rows = field_table(len(keep))
        for field in fields:
            _fill(rows, field, table[FIELDS[field]], keep)
        hist = _hists(table["hist"], keep) if with_hist else None
    except (pa.ArrowException, ValueError, TypeError, KeyError) as error:
        raise damaged(segment, str(error)) from error
    return RawStats(site[keep], step[keep], rows, hist)


def _whole(column: pa.ChunkedArray) -> NDArray[np.int64]:
    if column.null_count or not pa.types.is_integer(column.type):
        raise ValueError("a column of integers has another type")
    values: NDArray[np.int64] = column.to_numpy().astype(np.int64, copy=False)
    return values


def _fill(rows: Array, field: int, column: pa.ChunkedArray, keep: NDArray[np.intp]) -> None:
    """Replace absent values (null) by those of the empty sketch."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(f"column {FIELDS[field]} has type {column.type}")
    values = column.to_numpy()
    rows[:, field] = values if len(keep) == len(values) else values[keep]
    if column.null_count:
        absent = column.is_null().to_numpy()[keep]
        rows[absent, field] = _EMPTY[field]


def _hists(column: pa.ChunkedArray, keep: NDArray[np.intp]) -> NDArray[np.float32]:
    """Histograms of the kept rows; zeros where none was recorded."""
    lists = column.combine_chunks()
    lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    lists = lists.take(pa.array(keep))
    present = lists.is_valid().to_numpy(zero_copy_only=False)
    hist = np.zeros((len(keep), NUM_BINS), np.float32)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    lengths = lists.value_lengths().drop_null().to_numpy() if not pa.types.is_fixed_size_list(lists.type) else None
    if lengths is not None and not (lengths == NUM_BINS).all():
        raise ValueError(f"a histogram without {NUM_BINS} bins")
    hist[present] = values.reshape(-1, NUM_BINS)
    return hist


def is_in(values: Ids, wanted: Ids) -> NDArray[np.bool_]:
    """Like np.isin for sorted, unique `wanted`."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    if int(wanted[-1] - wanted[0]) + 1 == len(wanted):  # consecutive, as the sites of one kind usually are
        inside: NDArray[np.bool_] = (values >= wanted[0]) & (values <= wanted[-1])
        return inside
    position = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
    found: NDArray[np.bool_] = wanted[position] == values
    return found


def _from_frames(state: RunState, sites: Ids, steps: StepFilter, *, with_hist: bool) -> RawStats:
    records: list[StatsRecord] = []
    for frame in state.live_frames("stats"):
        if isinstance(frame.record, StatsRecord) and steps.mask(np.array([frame.record.step]))[0]:
            records.append(frame.record)
    return from_records(records, sites, with_hist=with_hist)


def _from_sums(state: RunState, sites: Ids, steps: StepFilter, *, with_hist: bool) -> RawStats | None:
    """Rows of tensors that are the sum over ranks."""
    sums = state.sums()
    found = [] if sums is None else list(sums.rows(set(sites.tolist())))
    found = [row for row in found if steps.mask(np.array([row[1]]))[0]]
    if not found:
        return None
    site, step, rows, hists = (list(column) for column in zip(*found, strict=True))
    hist = np.array(hists, np.float32) if with_hist else None
    return RawStats(np.array(site, np.int64), np.array(step, np.int64), np.array(rows), hist)


def from_records(records: list[StatsRecord], sites: Ids, *, with_hist: bool) -> RawStats:
    """The rows of these records that belong to some of the sites, in the order of the records."""
    site: list[Ids] = [np.empty(0, np.int64)]
    step: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    rows: list[Array] = [empty_rows(0)]
    hists: list[NDArray[np.float32]] = [np.empty((0, NUM_BINS), np.float32)]
    for record in records:
        ids = record.site_ids.astype(np.int64)
        keep = np.flatnonzero(is_in(ids, sites))
        if not len(keep):
            continue
        site.append(ids[keep])
        step.append(np.full(len(keep), record.step))
        rows.append(record.rows[keep])
        if with_hist:
            hist = np.zeros((len(ids), NUM_BINS), np.float32)
            np.add.at(hist, record.hist_index, record.hist)
            hists.append(hist[keep])
    return RawStats(
        np.concatenate(site), np.concatenate(step), np.concatenate(rows), np.concatenate(hists) if with_hist else None
    )


def sort_records(records: list[StatsRecord], sites: Ids, fields: frozenset[int], *, with_hist: bool) -> RawStats:
    """The rows of these records in the form of `read_raw`."""
    part = from_records(records, np.unique(sites), with_hist=with_hist)
    return _combine([part], fields | {N}, 1, with_hist=with_hist)


def _combine(parts: list[RawStats], fields: frozenset[int], bucket: int, *, with_hist: bool) -> RawStats:
    """Sort by (site, step) and merge rows of the same pair: shards, ranks, repeated calls, the steps of a bucket."""
    parts = [part for part in parts if len(part)] or parts[:1]
    site, step = (_join([getattr(part, name) for part in parts]) for name in ("site", "step"))
    step = step // bucket * bucket if bucket > 1 else step
    keys = _keys(site, step)
    if len(parts) == 1 and (keys[1:] > keys[:-1]).all():
        return RawStats(site, step, parts[0].rows, parts[0].hist)
    # Each part consists of sorted runs, which a stable sort of integers merges in nearly linear time.
    order = np.argsort(keys, kind="stable")
    site, step = site[order], step[order]
    rows = field_table(len(site))
    for field in fields:
        rows[:, field] = _join([part.rows[:, field] for part in parts])[order]
    hist = _join([part.hist for part in parts])[order] if with_hist else None
    starts = group_starts(site, step)
    if len(starts) == len(site):
        return RawStats(site, step, rows, hist)
    if hist is not None:
        hist = np.add.reduceat(hist, starts, axis=0)
    return RawStats(site[starts], step[starts], merge_groups(rows, starts), hist)


def _keys(site: Ids, step: NDArray[np.int64]) -> NDArray[np.int64]:
    """Integers that sort like (site, step)."""
    if not len(site):
        return site
    low, high = int(step.min()), int(step.max())
    if (int(site.max()) + 1) * (high - low + 1) < 1 << 62:
        return site * (high - low + 1) + (step - low)
    order = np.lexsort((step, site))
    keys = np.empty(len(site), np.int64)
    keys[order] = np.arange(len(site))
    return keys


def _join(columns: list[Any]) -> Any:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
