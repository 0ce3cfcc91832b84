"""Long ranges of many series from the pyramid: sketches merged over 4^k steps, shown as an average step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.catalog import Segment
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.cut import thin
from sonde.read.series.raw import RawStats, field_table, read_raw
from sonde.read.series.stats import Question, ask, long_table
from sonde.schema.joined import JOINED
from sonde.schema.layout import PYRAMID_FACTOR
from sonde.schema.records import Site
from sonde.schema.sketch import HIST_N, INDEX, INF, MAX, MIN, NAN, NUM_BINS, Array, N, merge_rows
from sonde.schema.stats import STATS

MAX_ROWS: Final = 2_000_000
"""Maximum number of rows read as recorded, which shows every spike; larger results come from the pyramid."""
STEPS_PER_ROW: Final = b"sonde.steps_per_row"
"""Key in the metadata of an overview: the number of steps per row."""

_FIXED_SIZE_KINDS: Final = frozenset({"param", "grad", "update", "optim"})


def read_overview(
    state: RunState, patterns: str | Sequence[str], steps: StepFilter, points: int, max_rows: int = MAX_ROWS
) -> pa.Table:
    """The long table of `read_stats` with about `points` buckets per series, keeping minimum and maximum of each."""
    question = ask(state.catalog.require().sites, patterns)
    level = pick_level(state, question, steps, max_rows)
    table = read_level(state, question, steps, level) if level else None
    if table is None:
        level = 0
        raw = read_raw(state, question.ids, steps, question.fields, with_hist=question.needs_hist)
        table = long_table(question, raw)
    thinned = thin(table, points)
    return thinned.replace_schema_metadata({STEPS_PER_ROW: str(PYRAMID_FACTOR**level).encode()})


def pick_level(state: RunState, question: Question, steps: StepFilter, max_rows: int) -> int:
    """The finest level with few enough rows; 0 if merged steps cannot be used."""
    if not all(_can_merge(question, stat) for stat in question.wanted):
        return 0
    share = len(question.ids) / max(len(question.sites), 1)
    segments = [s for s in state.segments_of("stats") if steps.span.overlaps(s.first_step, s.last_step)]
    num_rows = sum(segment.num_rows for segment in segments) * share
    level = 0
    while num_rows / PYRAMID_FACTOR**level > max_rows and state.segments_of("stats", level + 1):
        level += 1
    return level


def _can_merge(question: Question, stat: str) -> bool:
    """Whether values can be averaged: a mean needs no count of steps, a sum does, and so sites of constant size."""
    return is_intensive(stat) or all(question.sites[n].kind in _FIXED_SIZE_KINDS for n in question.wanted[stat])


@cache
def is_intensive(stat: str) -> bool:
    """Whether a sketch merged with itself keeps its value, as for a mean but not for a sum."""
    row = np.array([8, 1, 1, 1, 3, 7, 5, -1, 2, 9, -2, 2, 4, 8], np.float64)
    hist = np.zeros(NUM_BINS)
    hist[40:45] = 1
    once, twice = (_value(stat, rows, weight * hist) for rows, weight in ((row, 1), (merge_rows(row, row), 2)))
    return bool(np.isclose(once, twice))


def _value(stat: str, rows: Array, hist: Array) -> Array:
    if stat in JOINED:
        return JOINED[stat].of(*[rows] * (1 + len(JOINED[stat].partners)))
    return STATS[stat].of(rows, hist)


def read_level(state: RunState, question: Question, steps: StepFilter, level: int) -> pa.Table | None:
    """None if a file of the pyramid is damaged; the original rows are then used."""
    bucket = PYRAMID_FACTOR**level
    span = Span(steps.span.first // bucket * bucket, steps.span.last)
    segments = cover(state, level)
    with_hist, fields = question.needs_hist, question.fields
    try:
        raw = read_raw(
            state, question.ids, StepFilter(span), fields, with_hist=with_hist, segments=segments, bucket=bucket
        )
    except CorruptError:
        return None
    if any(segment.level and segment.name in state.damage for segment in segments):
        return None
    return long_table(question, average_step(question, raw))


@dataclass(frozen=True, slots=True)
class Columns:
    """Equal intervals of steps, each made of complete buckets of one level of the pyramid."""

    first: int
    last: int
    width: int
    """Steps per column."""
    level: int

    @property
    def count(self) -> int:
        return (self.last - self.first) // self.width + 1

    def of(self, steps: NDArray[np.int64]) -> NDArray[np.int64]:
        return (steps - self.first) // self.width


def make_columns(state: RunState, first: int, last: int, max_columns: int) -> Columns:
    """At most about `max_columns` columns that cover the recorded part of these steps."""
    last = max(min(last, state.last_step()), first)
    width = max(1, -(-(last - first + 1) // max_columns))
    level = level_within(state, width)
    width = -(-width // PYRAMID_FACTOR**level) * PYRAMID_FACTOR**level
    return Columns(first // width * width, last, width, level)


def level_within(state: RunState, width: int, at_least: int = 0) -> int:
    """The coarsest level whose buckets have at most `width` steps."""
    level = at_least
    while PYRAMID_FACTOR ** (level + 1) <= width and state.segments_of("stats", level + 1):
        level += 1
    return level


def cover(state: RunState, level: int) -> list[Segment]:
    """Files of a level, and of finer ones for steps not merged into it yet."""
    found: list[Segment] = []
    covered: dict[int, int] = {}
    for number in range(level, -1, -1):
        fresh = [s for s in state.segments_of("stats", number) if s.first_sequence > covered.get(s.rank, -1)]
        found += [part for segment in fresh for part in _whole_rows(state, segment)]
        for segment in fresh:
            covered[segment.rank] = max(covered.get(segment.rank, -1), segment.last_sequence)
    return found


def _whole_rows(state: RunState, segment: Segment) -> list[Segment]:
    """The file up to the last row whose steps are all visible, and finer files for the steps of the next row, some of
    which are abandoned."""
    bucket = PYRAMID_FACTOR**segment.level
    if segment.level == 0 or segment.last_step + bucket <= segment.until:
        return [segment]
    edge = segment.until // bucket * bucket
    parts = [replace(segment, until=edge)] if segment.first_step < edge else []
    for finer in state.segments_of("stats", segment.level - 1):
        is_part = segment.first_sequence <= finer.first_sequence and finer.last_sequence <= segment.last_sequence
        if is_part and finer.rank == segment.rank:
            parts += _whole_rows(state, replace(finer, since=max(edge, segment.since)))
    return parts


def average_step(question: Question, raw: RawStats) -> RawStats:
    """Divide sums by their number of steps, if the size of the site reveals it."""
    count = np.maximum(raw.rows[:, N] / np.maximum(_sizes(question, raw.site), 1.0), 1.0)
    rows = field_table(len(raw))  # only the requested fields: the others take no memory, but would in a copy
    for field in question.fields | {N, NAN, INF, HIST_N}:
        rows[:, field] = raw.rows[:, field] if field in (MIN, MAX) else raw.rows[:, field] / count
    return RawStats(raw.site, raw.step, rows, raw.hist)


def _sizes(question: Question, site: NDArray[np.int64]) -> Array:
    """Elements per step of the site of each row; infinite if steps differ, so that nothing is divided."""
    table = np.full(int(site.max(initial=-1)) + 1, np.inf)
    for number in question.ids.tolist():
        if number < len(table) and (size := _size(question.sites[number])):
            table[number] = size
    return table[site]


def _size(site: Site) -> int:
    """Elements per step; 0 if steps differ."""
    return math.prod(site.shape) if site.kind in _FIXED_SIZE_KINDS else 0


assert len(INDEX) == 14, "the sample row in is_intensive has one value for each field"
