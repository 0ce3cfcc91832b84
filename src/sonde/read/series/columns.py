"""Series of some sites as columns, read file by file without sorting what is already in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.catalog import Segment
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.cut import by_series, series_of
from sonde.read.series.pyramid import pick_level, read_level
from sonde.read.series.raw import read_raw
from sonde.read.series.stats import Question, stat_column
from sonde.schema.window import Column, once


def read_lines(
    state: RunState, stat: str, sites: Sequence[int], span: Span, max_rows: int
) -> tuple[dict[int, Column], bool]:
    """One stat of each site by id, and whether steps are merged because there would be more than `max_rows`."""
    question = Question(state.catalog.require().sites, {stat: sorted(sites)})
    level = pick_level(state, question, StepFilter(span), max_rows)
    table = read_level(state, question, StepFilter(span), level) if level else None
    if table is None:
        return read_columns(state, question, stat, span), False
    found = {series_of(name): column for name, column in by_series(table, ("kind", "site", "stat")).items()}
    ids = question.ids_by_name
    return {ids[name.kind, name.site]: own for name, own in found.items() if (name.kind, name.site) in ids}, True


def read_columns(state: RunState, question: Question, stat: str, span: Span) -> dict[int, Column]:
    """One stat of each requested site at every recorded step of the span; of values at the same step the last counts.

    Damaged files are left out and reported; if nothing is left, an error is raised.
    """
    parts: dict[int, list[Column]] = {site: [] for site in question.wanted[stat]}
    errors = []
    segments = [s for s in state.segments_of("stats") if span.overlaps(s.first_step, s.last_step)]
    sources: list[Sequence[Segment]] = [*([segment] for segment in segments), []]
    if state.is_divided:
        sources = [segments]  # the parts of one step are in files of several ranks
    for source in sources:
        try:
            _add(parts, state, question, stat, span, source)
        except CorruptError as error:
            errors.append(error)
    columns = {site: _joined(own) for site, own in parts.items()}
    if errors and not any(len(steps) for steps, _ in columns.values()):
        raise errors[0]
    return columns


def _add(
    parts: dict[int, list[Column]],
    state: RunState,
    question: Question,
    stat: str,
    span: Span,
    segments: Sequence[Segment],
) -> None:
    raw = read_raw(
        state,
        question.ids,
        StepFilter(span),
        question.fields,
        with_hist=question.needs_hist,
        segments=segments,
        with_live=not segments or state.is_divided,
    )
    found = stat_column(question, raw, stat)
    site, step = raw.site[found.index], raw.step[found.index]
    for number, own in parts.items():
        begin, end = np.searchsorted(site, (number, number + 1))
        if end > begin:
            own.append((step[begin:end], found.value[begin:end]))


def _joined(parts: Sequence[Column]) -> Column:
    steps: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *(steps for steps, _ in parts)])
    return once(steps, np.concatenate([np.empty(0), *(values for _, values in parts)]))
