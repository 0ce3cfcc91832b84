"""Reduces the points of a line without hiding anything: keeps each bucket's lowest, highest and first non-finite.

The one definition of thinning: tables, reports, the dashboard and the terminal all draw the points that this keeps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array

Index = NDArray[np.intp]


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
