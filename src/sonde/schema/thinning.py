"""Fewer points for a line, without hiding anything: of each bucket the lowest, the highest and the first non-finite.

The one definition of thinning: tables, reports, the dashboard and the terminal all draw what this file keeps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array

Index = NDArray[np.intp]


def min_max(steps: NDArray[np.int64], values: Array, num_buckets: int) -> Index:
    """Which points of one series to draw, in order: about two per bucket, and its first and last.

    >>> min_max(np.arange(6), np.array([0.0, 5.0, 1.0, 1.0, -7.0, 1.0]), 2).tolist()
    [0, 1, 4, 5]
    """
    if len(steps) <= 2 * num_buckets:
        return np.arange(len(steps))
    span = max(int(steps[-1] - steps[0]) + 1, 1)
    bucket = ((steps - steps[0]) * num_buckets // span).astype(np.int64)
    finite = np.flatnonzero(np.isfinite(values))
    ends = np.array([0, len(steps) - 1])
    order = finite[np.lexsort((values[finite], bucket[finite]))]
    lowest = order[_starts(bucket[order])]
    highest = order[_starts(bucket[order][::-1], backwards=True)] if len(order) else order
    odd = np.flatnonzero(~np.isfinite(values))
    return np.unique(np.concatenate([ends, lowest, highest, odd[_starts(bucket[odd])]]))


def _starts(groups: NDArray[np.int64], *, backwards: bool = False) -> Index:
    """Where each run of equal values begins; `backwards` gives where it ends in the order before it was reversed."""
    if not len(groups):
        return np.empty(0, np.intp)
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    return len(groups) - 1 - starts if backwards else starts
