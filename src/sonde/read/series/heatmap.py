"""The highest value of a stat in each cell of steps × sites: whatever stands out is kept, never averaged away.

Cells hold *places*: the log10 of the magnitude for stats that span decades, the value itself for shares and cosines.
-inf means that nothing was recorded, +inf that the tensor or the stat was not finite. So the highest place of some
cells is always what deserves attention, and pooling is `maximum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.read.run.catalog import Segment
from sonde.read.run.segments import EVERYTHING, Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.pyramid import average_step, cover, is_intensive
from sonde.read.series.raw import RawStats, read_raw, sort_records
from sonde.read.series.stats import Question, stat_column
from sonde.schema.layout import PYRAMID_FACTOR
from sonde.schema.records import StatsRecord
from sonde.schema.sketch import INF, NAN

Places = NDArray[np.float32]
Scale = Literal["log10", "linear"]

ZERO_PLACE: Final = -400.0
"""A value of zero: below every float64, and still a value."""
MISSING: Final = np.float32(-np.inf)
NOT_FINITE: Final = np.float32(np.inf)
_SMALLEST: Final = np.float32(1.2e-38)
"""Below it float32 loses digits."""
_LINEAR: Final = ("clip_factor", "dynamic_range", "below_fp16", "below_fp16_normal", "grad_cosine", "moment_cosine")


def scale_of(stat: str) -> Scale:
    """Shares and cosines are shown as they are, everything else by its order of magnitude."""
    return "linear" if stat in _LINEAR or stat.endswith("_fraction") else "log10"


@dataclass(frozen=True, slots=True)
class Cells:
    """Places of some rows at some steps (or first steps of buckets), in ascending order."""

    steps: NDArray[np.int64]
    places: Places
    """(steps, rows): rows lie side by side, so that pooling steps runs over whole rows at once."""

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.steps.nbytes


def no_cells(num_rows: int) -> Cells:
    return Cells(np.empty(0, np.int64), np.empty((0, num_rows), np.float32))


@dataclass(frozen=True, slots=True)
class HeatQuestion:
    """One stat of the sites of one kind, in the order of the picture's rows."""

    stat: str
    rows: tuple[int, ...]
    question: Question

    @staticmethod
    def of(state: RunState, stat: str, rows: Sequence[int]) -> HeatQuestion:
        return HeatQuestion(stat, tuple(rows), Question(state.catalog.require().sites, {stat: sorted(rows)}))


def sealed_cells(state: RunState, asked: HeatQuestion, segment: Segment) -> Cells:
    """The cells of one sealed file; of merged steps where it is one of the pyramid.

    A damaged file has none, and is named in the run's warnings.
    """
    raw = _read(state, asked, [segment], StepFilter(EVERYTHING), with_live=False)
    if raw is None:
        return no_cells(len(asked.rows))
    # A mean over merged steps is the mean of them all as it stands; only a sum has to be brought back to one step.
    is_sum = segment.level > 0 and not is_intensive(asked.stat)
    return to_cells(asked, average_step(asked.question, raw) if is_sum else raw)


def live_cells(state: RunState, asked: HeatQuestion, span: Span) -> Cells:
    """The cells of what is not sealed yet."""
    raw = _read(state, asked, [], StepFilter(span), with_live=True)
    return no_cells(len(asked.rows)) if raw is None else to_cells(asked, raw)


def record_cells(asked: HeatQuestion, records: list[StatsRecord]) -> Cells:
    """The cells of some records."""
    question = asked.question
    fields = question.fields | {NAN, INF}
    return to_cells(asked, sort_records(records, question.ids, fields, with_hist=question.needs_hist))


def join(parts: Sequence[Cells]) -> Cells:
    """Cells of several parts; where they have the same step, the higher."""
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps, kind="stable")
    places = np.concatenate([part.places for part in parts])[order]
    steps = steps[order]
    starts = _starts(steps)
    return Cells(steps[starts], places if len(starts) == len(steps) else _highest(places, starts))


def merged_segments(state: RunState, span: Span, level: int) -> list[Segment]:
    """The files of merged steps, and finer ones for what is not merged yet, that a first look at very many rows needs.

    In them a spike of one step is weakened; what is not finite is not.
    """
    bucket = PYRAMID_FACTOR**level
    return [s for s in cover(state, level) if span.overlaps(s.first_step // bucket * bucket, s.last_step + bucket)]


def _read(
    state: RunState, asked: HeatQuestion, segments: Sequence[Segment], steps: StepFilter, *, with_live: bool
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
    except CorruptError:  # the reader noted it in the run's damage
        return None


def to_cells(asked: HeatQuestion, raw: RawStats) -> Cells:
    """Spread rows (site, step) over steps × rows of the picture."""
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
    """How many steps there are, where every site has the same ones; 0 where not. Then a table is only turned around."""
    if not len(site):
        return 0
    count = int(np.searchsorted(site, site[0], side="right"))
    if len(site) % count or (site[::count] != site[count - 1 :: count]).any():
        return 0
    table = step.reshape(-1, count)
    return count if (table == table[0]).all() else 0


def _distinct(step: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Like np.unique with its inverse, by a table: steps lie close together, and sorting takes ten times as long."""
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
    """Site id -> row of the picture."""
    table = np.zeros(max((*asked.rows, *asked.question.ids.tolist()), default=0) + 1, np.intp)
    table[list(asked.rows)] = np.arange(len(asked.rows))
    return table


def to_places(values: NDArray[np.float64], scale: Scale) -> Places:
    """Where values lie on their scale."""
    if scale == "linear":
        places = values.astype(np.float32)
    else:
        with np.errstate(divide="ignore", over="ignore"):
            size = np.abs(values).astype(np.float32)
            places = np.log10(size)  # several times as fast as in float64
            far = np.flatnonzero((size < _SMALLEST) | np.isinf(size))
            places[far] = np.log10(np.abs(values[far]))
        places[far[values[far] == 0]] = ZERO_PLACE
    places[~np.isfinite(values)] = NOT_FINITE
    return places


def pool(cells: Cells, bucket: int) -> Cells:
    """The highest of each `bucket` steps, which begin at multiples of it."""
    if bucket == 1 or not len(cells.steps):
        return cells
    group = cells.steps // bucket
    starts = _starts(group)
    return Cells(group[starts] * bucket, _highest(cells.places, starts))


def pool_into(picture: Places, cells: Cells, first: int, steps_per_column: int) -> None:
    """Raise a picture (columns × rows) to the cells that fall into it."""
    begin, end = np.searchsorted(cells.steps, (first, first + steps_per_column * len(picture)))
    if begin == end:
        return
    column = (cells.steps[begin:end] - first) // steps_per_column
    starts = _starts(column)
    places = cells.places[begin:end]
    highest = places if len(starts) == len(column) else _highest(places, starts)
    at = column[starts]
    picture[at] = np.maximum(picture[at], highest)


def _highest(places: Places, starts: NDArray[np.intp]) -> Places:
    """The highest of each group of rows; one call for each is several times as fast as `maximum.reduceat`."""
    highest = np.empty((len(starts), places.shape[1]), np.float32)
    for row, (begin, end) in enumerate(pairwise((*starts.tolist(), len(places)))):
        np.maximum.reduce(places[begin:end], axis=0, out=highest[row])
    return highest


def _starts(group: NDArray[np.int64]) -> NDArray[np.intp]:
    return np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
