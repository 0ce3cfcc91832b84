"""One site closely: every stat at a step, and the histogram of exponents over time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.pyramid import cover
from sonde.read.series.raw import RawStats, read_raw
from sonde.read.series.stats import Question, stat_column
from sonde.run import Run
from sonde.schema.layout import PYRAMID_FACTOR
from sonde.schema.sketch import HIST_N, INF, MIN_EXPONENT, NAN, NUM_BINS, ZERO, N
from sonde.show.web.query import MAX_STEP, NotFoundError, Query
from sonde.show.web.runs import state_of
from sonde.show.web.structure import stats_of
from sonde.show.web.wire import Reply, binary_reply, json_reply, number

MAX_COLUMNS: Final = 1024
_FAR_BACK: Final = 1 << 20


def _site(state: RunState, query: Query) -> int:
    i = query.whole("i", 0, 1 << 31)
    if i not in state.catalog.require().sites:
        raise NotFoundError(f"no site {i}")
    return i


def cell(run: Run, query: Query) -> Reply:
    query.only("i", "step", "stat")
    state = state_of(run)
    i, step = _site(state, query), query.whole("step", 0, MAX_STEP)
    sites = state.catalog.sites
    question = Question(sites, {stat: [i] for stat in stats_of(sites[i].kind)})
    raw = _newest(state, question, i, step)
    if raw is None:
        return json_reply({"i": i, "step": step, "recorded_step": -1, "stats": {}})
    recorded = int(raw.step[raw.slice_of(i)][-1])
    stats: dict[str, Any] = {}
    for stat in question.wanted:
        column = stat_column(question, raw, stat)
        here = column.value[raw.step[column.index] == recorded]
        stats[stat] = number(float(here[-1])) if len(here) else None
    row = raw.rows[raw.slice_of(i)][-1]
    counts = {name: int(row[field]) for name, field in (("n", N), ("nan", NAN), ("inf", INF), ("zero", ZERO))}
    return json_reply({"i": i, "step": step, "recorded_step": recorded, "stats": {**counts, **stats}})


def _newest(state: RunState, question: Question, i: int, step: int) -> RawStats | None:
    """Rows up to the step, looking back further and further until there is one."""
    reach = 1
    while True:
        span = Span(max(step - reach + 1, 0), step)
        fields = question.fields | {N, NAN, INF, ZERO}
        raw = read_raw(state, question.ids, StepFilter(span), fields, with_hist=True)
        if len(raw.step[raw.slice_of(i)]):
            return raw
        if span.first == 0 or reach > _FAR_BACK:
            return None
        reach *= 32


def hist(run: Run, query: Query) -> Reply:
    query.only("i", "from", "to", "w")
    state = state_of(run)
    i = _site(state, query)
    last_step = state.last_step()
    first, last = query.span(last_step)
    last = min(last, max(last_step, first))
    width = max(1, -(-(last - first + 1) // query.whole("w", 1, MAX_COLUMNS, 200)))
    level = 0
    while PYRAMID_FACTOR ** (level + 1) <= width and state.segments_of("stats", level + 1):
        level += 1
    bucket = PYRAMID_FACTOR**level
    width = -(-width // bucket) * bucket
    first = first // width * width
    fields = frozenset({N, NAN, INF, ZERO, HIST_N})
    raw = read_raw(
        state,
        np.array([i]),
        StepFilter(Span(first, last)),
        fields,
        with_hist=True,
        segments=cover(state, level) if level else None,
        bucket=width,
    )
    count = (last - first) // width + 1
    counts = np.zeros((count, NUM_BINS), np.float32)
    totals, zeros, odd = (np.zeros(count) for _ in range(3))
    column = (raw.step - first) // width
    if raw.hist is not None and len(raw):
        counts[column] = raw.hist
        totals[column], zeros[column] = raw.rows[:, N], raw.rows[:, ZERO]
        odd[column] = raw.rows[:, NAN] + raw.rows[:, INF]
    header = {
        "last_step": last_step,
        "i": i,
        "first": first,
        "steps_per_column": width,
        "num_columns": count,
        "num_bins": NUM_BINS,
        "min_exponent": MIN_EXPONENT,
    }
    buffers = {
        "counts": ("f32", counts),
        "totals": ("f64", totals),
        "zeros": ("f64", zeros),
        "nonfinite": ("f64", odd),
    }
    return binary_reply(header, buffers)
