"""One site in detail: every stat at a step, and the histogram of exponents over time."""

from __future__ import annotations

from typing import Any, Final

from numpy.typing import NDArray

from sonde.run import Run
from sonde.schema.sketch import MIN_EXPONENT, NUM_BINS
from sonde.show.web.query import MAX_STEP, NotFoundError, Query
from sonde.show.web.structure import stats_of
from sonde.show.web.wire import Reply, binary_reply, json_reply, number

MAX_COLUMNS: Final = 1024


def _site(run: Run, query: Query) -> int:
    i = query.whole("i", 0, 1 << 31)
    if i not in run.catalog.require().sites:
        raise NotFoundError(f"no site {i}")
    return i


def cell(run: Run, query: Query) -> Reply:
    query.only("i", "step", "stat")
    i, step = _site(run, query), query.whole("step", 0, MAX_STEP)
    row = run.newest_row(i, step, stats_of(run.catalog.sites[i].kind))
    if row is None:
        return json_reply({"i": i, "step": step, "recorded_step": -1, "stats": {}})
    stats: dict[str, Any] = {name: None if value is None else number(value) for name, value in row.stats.items()}
    return json_reply({"i": i, "step": step, "recorded_step": row.step, "stats": {**row.counts, **stats}})


def hist(run: Run, query: Query) -> Reply:
    query.only("i", "from", "to", "w")
    i = _site(run, query)
    first, last = query.span(run.last_step)
    found = run.histogram(i, range(first, last + 1), columns=query.whole("w", 1, MAX_COLUMNS, 200))
    header = {
        "last_step": run.last_step,
        "i": i,
        "first": found.columns.first,
        "steps_per_column": found.columns.width,
        "num_columns": found.columns.count,
        "num_bins": NUM_BINS,
        "min_exponent": MIN_EXPONENT,
    }
    buffers: dict[str, tuple[str, NDArray[Any]]] = {
        "counts": ("f32", found.counts),
        "totals": ("f64", found.totals),
        "zeros": ("f64", found.zeros),
        "nonfinite": ("f64", found.nonfinite),
    }
    return binary_reply(header, buffers)
