"""Series as lines: logged numbers, stats of sites, readings of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import ALL_STEPS, StepFilter
from sonde.read.series.columns import read_columns
from sonde.read.series.cut import by_series, edges
from sonde.read.series.pyramid import pick_level, read_level
from sonde.read.series.scalars import read_named
from sonde.read.series.stats import Question
from sonde.run import Run
from sonde.schema.losses import training_loss
from sonde.schema.records import Site
from sonde.schema.sketch import COUNTS
from sonde.show.web.line_grid import Column, Line, lines_reply
from sonde.show.web.query import NotFoundError, Query
from sonde.show.web.runs import state_of
from sonde.show.web.structure import stats_of
from sonde.show.web.wire import Reply

MAX_SERIES: Final = 64
MAX_POINTS: Final = 4000
DEFAULT_POINTS: Final = 1000
MAX_ROWS: Final = 6_000_000
THROUGHPUT: Final = "throughput (steps/s)"
_MAX_SYSTEM: Final = 64
_ODD: Final = "nonfinite_fraction"
_COUNTS: Final = frozenset((*COUNTS, "nan_fraction", "inf_fraction", _ODD))
"""Stats that say themselves how much was not finite, or that do not depend on it."""


def _points(query: Query) -> int:
    return query.whole("points", 2, MAX_POINTS, DEFAULT_POINTS)


def scalars(run: Run, query: Query) -> Reply:
    query.only("i", "from", "to", "points")
    state = state_of(run)
    known = state.catalog.require().scalar_names
    wanted = query.wholes("i", MAX_SERIES)
    for i in wanted:
        if i not in known:
            raise NotFoundError(f"no scalar {i}")
    last_step = state.last_step()
    span = query.span(last_step)
    names = {i: known[i] for i in wanted}
    columns = by_name(read_named(state, names, StepFilter(Span(*span))))
    lines = [Line(i, known[i], columns.get(known[i], _NOTHING)) for i in wanted]
    return lines_reply(lines, span, _points(query), last_step=last_step)


_NOTHING: Final[Column] = (np.empty(0, np.int64), np.empty(0))


def by_name(table: pa.Table) -> dict[str, Column]:
    """Like by_series, for names that may hold anything."""
    if not table.num_rows:
        return {}
    bounds = edges(table, ("name",))
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    return {table["name"][start].as_py(): (steps[start:end], values[start:end]) for start, end in pairwise(bounds)}


def lines(run: Run, query: Query) -> Reply:
    query.only("i", "stat", "from", "to", "points")
    state = state_of(run)
    known = state.catalog.require().sites
    wanted = query.wholes("i", MAX_SERIES)
    for i in wanted:
        if i not in known:
            raise NotFoundError(f"no site {i}")
    stats = {stat for i in wanted for stat in stats_of(known[i].kind)}
    stat = query.word("stat", stats)
    able = [i for i in wanted if stat in stats_of(known[i].kind)]
    last_step = state.last_step()
    span = query.span(last_step)
    columns, is_merged = _read(state, Question(known, {stat: sorted(able)}), stat, Span(*span))
    odd = _odd_steps(state, known, stat, able, Span(*span))
    own = [Line(i, f"{known[i].kind}/{known[i].name}/{stat}", columns.get(i, _NOTHING), odd.get(i)) for i in wanted]
    return lines_reply(own, span, _points(query), last_step=last_step, is_merged=is_merged)


def _odd_steps(
    state: RunState, known: Mapping[int, Site], stat: str, sites: Sequence[int], span: Span
) -> dict[int, NDArray[np.int64]]:
    """Steps at which a part of a tensor was not finite: a norm of the rest looks healthy, or is 0."""
    able = [] if stat in _COUNTS else [i for i in sites if _ODD in stats_of(known[i].kind)]
    if not able:
        return {}
    shares, _ = _read(state, Question(dict(known), {_ODD: sorted(able)}), _ODD, span)
    return {i: steps[values > 0] for i, (steps, values) in shares.items()}


def _read(state: RunState, question: Question, stat: str, span: Span) -> tuple[dict[int, Column], bool]:
    """Every step where that is not too much, else steps merged by fours."""
    level = pick_level(state, question, StepFilter(span), MAX_ROWS)
    table = read_level(state, question, StepFilter(span), level) if level else None
    if table is None:
        return read_columns(state, question, stat, span), False
    found = by_series(table, ("kind", "site", "stat"))
    return {ids: column for name, column in found.items() if (ids := _id_of(question, name)) is not None}, True


def _id_of(question: Question, name: str) -> int | None:
    kind, _, rest = name.partition("/")
    return question.ids_by_name.get((kind, rest.rpartition("/")[0]))


def system(run: Run, query: Query) -> Reply:
    query.only("points")
    state = state_of(run)
    last_step = state.last_step()
    table = run.system()
    names = np.array(table["name"].to_pylist(), dtype=object)
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    own = [
        Line(-1, str(name), (steps[names == name], values[names == name]))
        for name in list(dict.fromkeys(names.tolist()))[:_MAX_SYSTEM]
    ]
    speed = _throughput(state)
    if len(speed[0]):
        own.insert(0, Line(-1, THROUGHPUT, speed))
    return lines_reply(own, (0, max(last_step, 0)), _points(query), last_step=last_step)


def _throughput(state: RunState) -> Column:
    """Steps per second, over stretches of about a two-hundredth of the run, from when numbers were logged."""
    names = state.catalog.require().scalar_names
    loss = training_loss(names.values())
    busiest = next(iter(sorted(names.items(), key=lambda item: (item[1] != loss, item[0]))), None)
    if busiest is None:
        return _NOTHING
    try:
        table = read_named(state, dict([busiest]), ALL_STEPS)
    except CorruptError:  # named in the run's warnings
        return _NOTHING
    steps, times = table["step"].to_numpy(), table["time"].to_numpy()
    if len(steps) < 2:
        return _NOTHING
    pick = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 201)).astype(np.intp))
    steps, times = steps[pick], times[pick]
    passed = np.diff(times)
    forward = passed > 0  # clocks jump
    return steps[1:][forward], np.diff(steps)[forward] / passed[forward]
