"""A whole run as one window for the rules: every step of a short run, both ends and a thinned middle of a long one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sonde.errors import CorruptError
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import ALL_STEPS, StepFilter
from sonde.read.run.tables import event_table, system_table
from sonde.read.series.cut import by_series, series_of
from sonde.read.series.pyramid import pick_level, read_level
from sonde.read.series.raw import read_raw
from sonde.read.series.scalars import read_scalars
from sonde.read.series.stats import ask, long_table
from sonde.schema.names import Series, inspected_series
from sonde.schema.window import Column, Window

DENSE_STEPS: Final = 2048
"""Maximum number of steps of a run that is read completely."""
END_STEPS: Final = 512
"""Steps read at either end of a longer run; between them about DENSE_STEPS, evenly spaced."""


def read_window(state: RunState, patterns: Sequence[str], structure: Mapping[str, Any]) -> Window:
    """The series that match the patterns, all scalars, and facts about the run."""
    series: dict[Series, Column] = {}
    for filter in _filters(state.last_step()):
        for name, column in _stats(state, patterns, filter).items():
            series[name] = _joined(series[name], column) if name in series else column
    scalars: dict[str, Column] = {}
    for text, column in _scalars(state).items():
        inspected = inspected_series(text)
        if inspected is not None:
            series[inspected] = column
        else:
            scalars[text] = column
    return Window(series, scalars, _facts(state, structure))


def read_merged_window(state: RunState, patterns: Sequence[str], structure: Mapping[str, Any], max_rows: int) -> Window:
    """A window of a run that is too long to read: about `max_rows` rows of steps merged by 4, 16, … and averaged.

    Use it for pictures, not for rules: events of a single step are averaged away.
    """
    question = ask(state.catalog.require().sites, patterns, strict=False)
    level = pick_level(state, question, ALL_STEPS, max_rows) if question.wanted else 0
    table = read_level(state, question, ALL_STEPS, level) if level else None
    if table is None:
        return read_window(state, patterns, structure)
    found = by_series(table, ("kind", "site", "stat"))
    series = {series_of(name): column for name, column in found.items()}
    return Window(series, {}, _facts(state, structure))


def _filters(last_step: int) -> list[StepFilter]:
    if last_step < DENSE_STEPS:
        return [ALL_STEPS]
    first, last = END_STEPS, last_step - END_STEPS
    stride = max(1, (last - first) // DENSE_STEPS)
    return [
        StepFilter(Span(0, first - 1)),
        StepFilter(Span(first, last), stride),
        StepFilter(Span(last + 1, last_step)),
    ]


def _stats(state: RunState, patterns: Sequence[str], steps: StepFilter) -> dict[Series, Column]:
    question = ask(state.catalog.require().sites, patterns, strict=False)
    if not question.wanted:
        return {}
    raw = read_raw(state, question.ids, steps, question.fields, with_hist=question.needs_hist)
    table = long_table(question, raw)
    found = by_series(table, ("kind", "site", "stat"))
    named = {series_of(name): column for name, column in found.items()}
    order = {(site.kind, site.name): number for number, site in question.sites.items()}
    return dict(sorted(named.items(), key=lambda item: order.get((item[0].kind, item[0].site), 0)))


def _joined(a: Column, b: Column) -> Column:
    return np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])


def _scalars(state: RunState) -> dict[str, Column]:
    table = read_scalars(state, "*", ALL_STEPS)
    scalars = by_series(table, ("name",))
    if table.num_rows:
        steps, times = table["step"].to_numpy(), table["time"].to_numpy()
        last = np.full(int(steps.max()) + 1, -np.inf)
        np.maximum.at(last, np.maximum(steps, 0), times)
        seen = np.flatnonzero(np.isfinite(last))
        scalars["clock"] = (seen.astype(np.int64), last[seen])
    for name, column in _system(state).items():
        scalars[f"system/{name}"] = column
    return scalars


def _system(state: RunState) -> dict[str, Column]:
    try:
        table = system_table(state)
    except CorruptError:  # system readings are optional; the damage is listed in `warnings`
        return {}
    names = table["name"].to_pylist()
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name, []).append(row)
    return {name: (steps[rows], values[rows]) for name, rows in found.items()}


def _facts(state: RunState, structure: Mapping[str, Any]) -> dict[str, Any]:
    manifest, status, sites = state.manifest, state.status(), state.catalog.require().sites.values()
    return {
        **manifest.facts,
        "model": structure,
        "dtypes": {f"{site.kind}/{site.name}": site.dtype for site in sites},
        "shapes": {f"{site.kind}/{site.name}": site.shape for site in sites},
        "config": manifest.config,
        "environment": manifest.environment,
        "status": status.status,
        "reason": status.reason,
        "is_lost": status.is_lost,
        "events": _events(state),
    }


def _events(state: RunState) -> list[dict[str, Any]]:
    try:
        table: pa.Table = event_table(state)
    except CorruptError:
        return []
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row["details"] = _details(row["details"])
    return rows


def _details(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}
