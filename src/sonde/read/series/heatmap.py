"""Cells of a heatmap, read file by file; schema/thinning.py defines a cell."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.catalog import Segment
from sonde.read.run.segments import EVERYTHING, Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.pyramid import average_step, cover, is_intensive, level_within
from sonde.read.series.raw import RawStats, read_raw, sort_records
from sonde.read.series.stats import Question, stat_column
from sonde.schema.attempts import History
from sonde.schema.joined import JOINED
from sonde.schema.layout import PYRAMID_FACTOR
from sonde.schema.records import StatsRecord
from sonde.schema.sketch import INF, NAN
from sonde.schema.thinning import MISSING, NOT_FINITE, Cells, join, no_cells, scale_of, to_places


@dataclass(frozen=True, slots=True)
class HeatQuestion:
    """One stat of the sites of one kind, in the order of the map's rows."""

    stat: str
    rows: tuple[int, ...]
    question: Question

    @staticmethod
    def of(state: RunState, stat: str, rows: Sequence[int]) -> HeatQuestion:
        return HeatQuestion(stat, tuple(rows), Question(state.catalog.require().sites, {stat: sorted(rows)}))


@dataclass(frozen=True, slots=True)
class Heat:
    """Cells of one stat of some sites. A viewer may cache those of a file by its name: sealed files never change."""

    state: RunState
    asked: HeatQuestion

    def files(self, first: int, last: int) -> list[Segment]:
        """The files of single steps that overlap this range of steps."""
        if self.state.is_divided:
            return []  # no file has whole sketches: `live_cells` reads them all
        span = Span(first, last)
        return [s for s in self.state.segments_of("stats") if span.overlaps(s.first_step, s.last_step)]

    def merged_files(self, first: int, last: int, width: int) -> list[Segment]:
        """Much smaller files for the same range, with steps merged by at most a column of `width` (or by four)."""
        if self.state.is_divided:
            return []
        level = level_within(self.state, width, at_least=1)
        return merged_segments(self.state, Span(first, last), level)

    def num_rows(self, files: Sequence[Segment]) -> float:
        """Estimated number of sketches to read from these files."""
        share = len(self.asked.question.ids) / max(len(self.state.catalog.sites), 1)
        return sum(segment.num_rows for segment in files) * share

    def cells(self, file: Segment) -> Cells:
        return sealed_cells(self.state, self.asked, file)


def sealed_cells(state: RunState, asked: HeatQuestion, segment: Segment) -> Cells:
    """The cells of one sealed file; those of merged steps if it belongs to the pyramid.

    A damaged file has none, and is listed in the run's warnings.
    """
    raw = _read(state, asked, [segment], StepFilter(EVERYTHING), with_live=False)
    if raw is None:
        return no_cells(len(asked.rows))
    # A mean over merged steps is already a mean; only a sum has to be scaled back to one step.
    is_sum = segment.level > 0 and not is_intensive(asked.stat)
    return to_cells(asked, average_step(asked.question, raw) if is_sum else raw)


def live_cells(state: RunState, asked: HeatQuestion, span: Span) -> Cells:
    """The cells of data that is not sealed yet."""
    raw = _read(state, asked, None if state.is_divided else [], StepFilter(span), with_live=True)
    return no_cells(len(asked.rows)) if raw is None else to_cells(asked, raw)


def record_cells(asked: HeatQuestion, records: list[StatsRecord]) -> Cells:
    question = asked.question
    fields = question.fields | {NAN, INF}
    return to_cells(asked, sort_records(records, question.ids, fields, with_hist=question.needs_hist))


def merged_segments(state: RunState, span: Span, level: int) -> list[Segment]:
    """The files of merged steps, and finer ones for steps not merged yet, for a first view of very many rows.

    Merging weakens a spike of one step, but keeps non-finite values.
    """
    bucket = PYRAMID_FACTOR**level
    return [s for s in cover(state, level) if span.overlaps(s.first_step // bucket * bucket, s.last_step + bucket)]


def _read(
    state: RunState, asked: HeatQuestion, segments: Sequence[Segment] | None, steps: StepFilter, *, with_live: bool
) -> RawStats | None:
    question = asked.question
    try:
        return read_raw(
            state,
            question.ids,
            steps,
            question.fields | {NAN, INF},
            with_hist=question.needs_hist,
            segments=segments,
            with_live=with_live,
        )
    except CorruptError:  # the reader added it to the run's damage
        return None


def to_cells(asked: HeatQuestion, raw: RawStats) -> Cells:
    """Arrange rows (site, step) as steps × rows of the map."""
    column = stat_column(asked.question, raw, asked.stat)
    places = to_places(column.value, scale_of(asked.stat))
    odd = (raw.rows[:, NAN] + raw.rows[:, INF]) > 0
    places[odd[column.index]] = NOT_FINITE
    is_whole = len(column.index) == len(raw)
    site, step = (raw.site, raw.step) if is_whole else (raw.site[column.index], raw.step[column.index])
    num_steps = _num_common_steps(site, step)
    if num_steps:
        cells = np.full((num_steps, len(asked.rows)), MISSING, np.float32)
        cells[:, _positions(asked)[site[::num_steps]]] = places.reshape(-1, num_steps).T
        return Cells(step[:num_steps], cells)
    steps, at = _distinct(step)
    cells = np.full((len(steps), len(asked.rows)), MISSING, np.float32)
    cells[at, _positions(asked)[site]] = places
    return Cells(steps, cells)


def _num_common_steps(site: NDArray[np.int64], step: NDArray[np.int64]) -> int:
    """Number of steps if every site has the same ones, so that the table only needs transposing; otherwise 0."""
    if not len(site):
        return 0
    count = int(np.searchsorted(site, site[0], side="right"))
    if len(site) % count or (site[::count] != site[count - 1 :: count]).any():
        return 0
    table = step.reshape(-1, count)
    return count if (table == table[0]).all() else 0


def _distinct(step: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Like np.unique with its inverse, by a lookup table: steps are close together, and sorting is ten times slower."""
    if not len(step):
        return step, np.empty(0, np.intp)
    low, high = int(step.min()), int(step.max())
    if high - low > 8 * len(step) + 4096:
        steps, at = np.unique(step, return_inverse=True)
        return steps, at
    table = np.zeros(high - low + 1, np.intp)
    table[step - low] = 1
    steps = np.flatnonzero(table) + low
    table[steps - low] = np.arange(len(steps))
    return steps, table[step - low]


def _positions(asked: HeatQuestion) -> NDArray[np.intp]:
    """Site id -> row of the map."""
    table = np.zeros(max((*asked.rows, *asked.question.ids.tolist()), default=0) + 1, np.intp)
    table[list(asked.rows)] = np.arange(len(asked.rows))
    return table


_MAX_PARTS: Final = 32


@dataclass(slots=True)
class LiveCells:
    """Cells that grow with the log. They may include data sealed meanwhile: counting a maximum twice is harmless."""

    _seen: int = -1
    """Sequence of the last frame that was read."""
    _parts: list[tuple[int, Cells]] = field(default_factory=list)
    """Cells, each with the sequence of its last frame."""
    _history: History | None = None
    """Attempts of the parts."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, heat: Heat) -> Cells:
        """The cells of the data that is unsealed now. Always called with the same stat and sites."""
        state, asked = heat.state, heat.asked
        logs = state.logs.get("stats", [])
        # Sites of a joined stat may come in two frames of one step, and sketches of several ranks are merged by step.
        if len(logs) != 1 or asked.stat in JOINED or state.is_divided:
            return live_cells(state, asked, EVERYTHING)
        sealed = state.last_sealed("stats", logs[0].rank)
        with self._lock:
            if state.history != self._history:
                self._history, self._seen, self._parts = state.history, -1, []
            frames = state.shown_frames(logs[0], after=max(self._seen, sealed))
            records = [frame.record for frame in frames if isinstance(frame.record, StatsRecord)]
            self._parts = [(last, cells) for last, cells in self._parts if last > sealed]
            if records:
                self._seen = max(frame.sequence for frame in frames)
                self._parts.append((self._seen, record_cells(asked, records)))
            if len(self._parts) > _MAX_PARTS:
                self._parts = [(self._parts[-1][0], join([cells for _, cells in self._parts]))]
            parts = [cells for _, cells in self._parts]
        return join(parts) if parts else no_cells(len(asked.rows))
