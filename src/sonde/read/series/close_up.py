"""One site in detail: its newest sketch at a step, and its histogram of exponents over columns of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.pyramid import Columns, cover
from sonde.read.series.raw import RawStats, read_raw
from sonde.read.series.stats import Question, stat_column
from sonde.schema.sketch import HIST_N, INF, NAN, NUM_BINS, ZERO, Array, N

_FAR_BACK: Final = 1 << 20
_COUNTS: Final = {"n": N, "nan": NAN, "inf": INF, "zero": ZERO}


@dataclass(frozen=True, slots=True)
class SiteRow:
    """The sketch of one site at one step."""

    step: int
    counts: dict[str, int]
    """n, nan, inf, zero."""
    stats: dict[str, float | None]
    """None for a stat that was not measured at this step."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of (columns, bins of exponents), and the counts of each column outside all bins."""

    columns: Columns
    counts: NDArray[np.float32]
    totals: Array
    zeros: Array
    nonfinite: Array


def newest_row(state: RunState, site: int, step: int, stats: Sequence[str]) -> SiteRow | None:
    """The last sketch up to this step; None if there is none."""
    question = Question(state.catalog.require().sites, {stat: [site] for stat in stats})
    raw = _newest(state, question, site, step)
    if raw is None:
        return None
    recorded = int(raw.step[raw.slice_of(site)][-1])
    row = raw.rows[raw.slice_of(site)][-1]
    counts = {name: int(row[field]) for name, field in _COUNTS.items()}
    return SiteRow(recorded, counts, {stat: _at(question, raw, stat, recorded) for stat in stats})


def _at(question: Question, raw: RawStats, stat: str, step: int) -> float | None:
    column = stat_column(question, raw, stat)
    here = column.value[raw.step[column.index] == step]
    return float(here[-1]) if len(here) else None


def _newest(state: RunState, question: Question, site: int, step: int) -> RawStats | None:
    """Rows up to the step, searching further back until there is one."""
    reach = 1
    while True:
        span = Span(max(step - reach + 1, 0), step)
        fields = question.fields | set(_COUNTS.values())
        raw = read_raw(state, question.ids, StepFilter(span), fields, with_hist=True)
        if len(raw.step[raw.slice_of(site)]):
            return raw
        if span.first == 0 or reach > _FAR_BACK:
            return None
        reach *= 32


def read_histogram(state: RunState, site: int, columns: Columns) -> Histogram:
    raw = read_raw(
        state,
        np.array([site]),
        StepFilter(Span(columns.first, columns.last)),
        frozenset({*_COUNTS.values(), HIST_N}),
        with_hist=True,
        segments=cover(state, columns.level) if columns.level else None,
        bucket=columns.width,
    )
    counts = np.zeros((columns.count, NUM_BINS), np.float32)
    totals, zeros, odd = (np.zeros(columns.count) for _ in range(3))
    at = columns.of(raw.step)
    if raw.hist is not None and len(raw):
        counts[at] = raw.hist
        totals[at], zeros[at] = raw.rows[:, N], raw.rows[:, ZERO]
        odd[at] = raw.rows[:, NAN] + raw.rows[:, INF]
    return Histogram(columns, counts, totals, zeros, odd)
