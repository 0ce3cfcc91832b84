"""Fewer points for a picture, without hiding anything.

Of a line, `min_max` keeps each bucket's lowest, highest and first non-finite value. It is the one definition of
thinning: tables, reports, the dashboard and the terminal all draw the points that it keeps.

Of a heat map, `pool` keeps the highest *place*: the log10 of the magnitude for stats that span decades, the value
itself for fractions and cosines. -inf means that nothing was recorded, +inf that the tensor or the stat was not finite.
So the highest place of some cells is always the one that deserves attention, and pooling is `maximum`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array

Index = NDArray[np.intp]
Places = NDArray[np.float32]
Scale = Literal["log10", "linear"]

ZERO_PLACE: Final = -400.0
"""A value of zero: below every float64, and still a value."""
MISSING: Final = np.float32(-np.inf)
NOT_FINITE: Final = np.float32(np.inf)
_SMALLEST: Final = np.float32(1.2e-38)
"""Below it float32 loses digits."""
_LINEAR: Final = ("clip_factor", "dynamic_range", "below_fp16_normal", "grad_cosine", "moment_cosine")


def min_max(steps: NDArray[np.int64], values: Array, num_buckets: int) -> Index:
    """The points of one series to draw, in order: about two per bucket, and its first and last.

    >>> min_max(np.arange(6), np.array([0.0, 5.0, 1.0, 1.0, -7.0, 1.0]), 2).tolist()
    [0, 1, 4, 5]
    """
    if len(steps) <= 2 * num_buckets:
        return np.arange(len(steps))
    span = max(int(steps[-1] - steps[0]) + 1, 1)
    bucket = ((steps - steps[0]) * num_buckets // span).astype(np.int64)
    finite = np.flatnonzero(np.isfinite(values))
    odd = np.flatnonzero(~np.isfinite(values))
    ends = np.array([0, len(steps) - 1])
    lowest, highest = extremes(bucket[finite], values[finite])
    return np.unique(np.concatenate([ends, finite[lowest], finite[highest], odd[group_starts(bucket[odd])]]))


def extremes(bucket: NDArray[np.int64], values: Array) -> tuple[Index, Index]:
    """Positions of the lowest and of the highest value of each bucket; of several, the first lowest and last
    highest."""
    starts = group_starts(bucket)
    if not len(starts):
        return starts, starts
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(values))))
    place = np.arange(len(values))
    is_low = values == np.minimum.reduceat(values, starts)[group]
    is_high = values == np.maximum.reduceat(values, starts)[group]
    lowest = np.minimum.reduceat(np.where(is_low, place, len(values)), starts)
    return lowest, np.maximum.reduceat(np.where(is_high, place, -1), starts)


def group_starts(*columns: NDArray[np.generic]) -> Index:
    """The start of each run of equal values; with several columns, of equal combinations.

    >>> group_starts(np.array([3, 3, 5]))
    array([0, 2])
    """
    changes = np.zeros(len(columns[0]), np.bool_)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def scale_of(stat: str) -> Scale:
    """Fractions and cosines are shown as they are, everything else by its order of magnitude."""
    return "linear" if stat in _LINEAR or stat.endswith("_fraction") else "log10"


@dataclass(frozen=True, slots=True)
class Cells:
    """Places of some rows at some steps (or first steps of buckets), in ascending order."""

    steps: NDArray[np.int64]
    places: Places
    """(steps, rows): rows are contiguous, so that pooling steps processes whole rows at once."""

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.steps.nbytes


def no_cells(num_rows: int) -> Cells:
    return Cells(np.empty(0, np.int64), np.empty((0, num_rows), np.float32))


def to_places(values: NDArray[np.float64], scale: Scale) -> Places:
    """The position of values on their scale."""
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


def join(parts: Sequence[Cells]) -> Cells:
    """Cells of several parts; for the same step, the higher."""
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps, kind="stable")
    places = np.concatenate([part.places for part in parts])[order]
    steps = steps[order]
    starts = group_starts(steps)
    return Cells(steps[starts], places if len(starts) == len(steps) else _highest(places, starts))


def pool(cells: Cells, bucket: int) -> Cells:
    """The highest of each `bucket` steps, which start at multiples of it."""
    if bucket == 1 or not len(cells.steps):
        return cells
    group = cells.steps // bucket
    starts = group_starts(group)
    return Cells(group[starts] * bucket, _highest(cells.places, starts))


def pool_into(picture: Places, cells: Cells, first: int, steps_per_column: int) -> None:
    """Raise a picture (columns × rows) to the cells that fall into it."""
    begin, end = np.searchsorted(cells.steps, (first, first + steps_per_column * len(picture)))
    if begin == end:
        return
    column = (cells.steps[begin:end] - first) // steps_per_column
    starts = group_starts(column)
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
