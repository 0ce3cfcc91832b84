"""Series as lines: logged numbers, stats of sites, system readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.run import Run
from sonde.schema.losses import training_loss
from sonde.schema.records import Site
from sonde.schema.sketch import COUNTS
from sonde.schema.window import Column
from sonde.show.summary import steps_per_second
from sonde.show.web.line_grid import Line, lines_reply
from sonde.show.web.query import NotFoundError, Query
from sonde.show.web.structure import stats_of
from sonde.show.web.wire import Reply

MAX_SERIES: Final = 64
MAX_POINTS: Final = 4000
DEFAULT_POINTS: Final = 1000
MAX_ROWS: Final = 6_000_000
RATE_POINTS: Final = 200
THROUGHPUT: Final = "throughput (steps/s)"
_MAX_SYSTEM: Final = 64
_ODD: Final = "nonfinite_fraction"
_COUNTS: Final = frozenset((*COUNTS, "nan_fraction", "inf_fraction", _ODD))
"""Stats that include the non-finite fraction, or do not depend on it."""


def _points(query: Query) -> int:
    return query.whole("points", 2, MAX_POINTS, DEFAULT_POINTS)


def _steps(span: tuple[int, int]) -> range:
    return range(span[0], span[1] + 1)


def scalars(run: Run, query: Query) -> Reply:
    query.only("i", "from", "to", "points")
    known = run.catalog.require().scalar_names
    wanted = query.wholes("i", MAX_SERIES)
    for i in wanted:
        if i not in known:
            raise NotFoundError(f"no scalar {i}")
    last_step = run.last_step
    span = query.span(last_step)
    columns = run.scalar_lines([known[i] for i in wanted], steps=_steps(span), exact=True)
    lines = [Line(i, known[i], columns.get(known[i], _NOTHING)) for i in wanted]
    return lines_reply(lines, span, _points(query), last_step=last_step)


_NOTHING: Final[Column] = (np.empty(0, np.int64), np.empty(0))


def lines(run: Run, query: Query) -> Reply:
    query.only("i", "stat", "from", "to", "points")
    known = run.catalog.require().sites
    wanted = query.wholes("i", MAX_SERIES)
    for i in wanted:
        if i not in known:
            raise NotFoundError(f"no site {i}")
    stats = {stat for i in wanted for stat in stats_of(known[i].kind)}
    stat = query.stat(stats)
    able = [i for i in wanted if stat in stats_of(known[i].kind)]
    last_step = run.last_step
    span = query.span(last_step)
    columns, is_merged = run.site_lines(stat, able, _steps(span), max_rows=MAX_ROWS)
    odd = _odd_steps(run, known, stat, able, _steps(span))
    own = [Line(i, f"{known[i].kind}/{known[i].name}/{stat}", columns.get(i, _NOTHING), odd.get(i)) for i in wanted]
    return lines_reply(own, span, _points(query), last_step=last_step, is_merged=is_merged)


def _odd_steps(
    run: Run, known: Mapping[int, Site], stat: str, sites: Sequence[int], steps: range
) -> dict[int, NDArray[np.int64]]:
    """Steps at which a part of a tensor was non-finite: the norm of the rest looks healthy, or is 0."""
    able = [] if stat in _COUNTS else [i for i in sites if _ODD in stats_of(known[i].kind)]
    if not able:
        return {}
    shares, _ = run.site_lines(_ODD, able, steps, max_rows=MAX_ROWS)
    return {i: own[values > 0] for i, (own, values) in shares.items()}


def system(run: Run, query: Query) -> Reply:
    query.only("points")
    last_step = run.last_step
    table = run.system()
    names = np.array(table["name"].to_pylist(), dtype=object)
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    own = [
        Line(-1, str(name), (steps[names == name], values[names == name]))
        for name in list(dict.fromkeys(names.tolist()))[:_MAX_SYSTEM]
    ]
    speed = _throughput(run)
    if len(speed[0]):
        own.insert(0, Line(-1, THROUGHPUT, speed))
    return lines_reply(own, (0, max(last_step, 0)), _points(query), last_step=last_step)


def _throughput(run: Run) -> Column:
    """Steps per second over intervals of about 1/200 of the run, from the times at which numbers were logged."""
    names = run.catalog.require().scalar_names
    loss = training_loss(names.values())
    busiest = next(iter(sorted(names.items(), key=lambda item: (item[1] != loss, item[0]))), None)
    if busiest is None:
        return _NOTHING
    try:
        table = run.scalars(busiest[1], exact=True)
    except CorruptError:  # listed in the run's warnings
        return _NOTHING
    return steps_per_second(table["step"].to_numpy(), table["time"].to_numpy(), RATE_POINTS)
