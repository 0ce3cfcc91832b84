"""Histograms of binary exponents from samples, on the host; and places to sample where a compiler must know them.

Knows no framework.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import INF, MIN_EXPONENT, NAN, NUM_BINS, ZERO, Array, N

LEAP: Final = 40_507
"""A prime: it shares no factor with the length of a row. Times any place of a sample it stays within 32 bits."""


def histograms(samples: NDArray[np.floating], rows: Array) -> Array:
    """(T, NUM_BINS) estimated counts over all elements from a (T, size) table of samples, padded with zeros.

    A sampled count is scaled by (non-zero finite elements / those in the sample), so that histograms of differently
    sampled tensors merge without bias, and a row's histogram adds up to its number of non-zero finite elements.
    """
    num = len(samples)
    usable = np.isfinite(samples) & (samples != 0)
    _, exponent = np.frexp(np.where(usable, samples, 1.0))
    bins = np.clip(exponent - 1 - MIN_EXPONENT, 0, NUM_BINS - 1)
    bins = np.where(usable, bins, NUM_BINS) + (np.arange(num) * (NUM_BINS + 1))[:, None]
    counts = np.bincount(bins.ravel(), minlength=num * (NUM_BINS + 1)).reshape(num, NUM_BINS + 1)[:, :NUM_BINS]
    return scaled(counts.astype(np.float64), rows)


def scaled(counts: Array, rows: Array) -> Array:
    """What the counts of a sample stand for: as many as there are non-zero finite elements."""
    seen = counts.sum(axis=1)
    there = rows[:, N] - rows[:, NAN] - rows[:, INF] - rows[:, ZERO]
    scale = np.divide(there, seen, out=np.zeros(len(counts)), where=seen > 0)
    found: Array = counts * scale[:, None]
    return found


def places(numel: int, size: int) -> NDArray[np.int32]:
    """Which elements to look at: all, or one of each of `size` equal stretches. Those are not evenly apart: a distance
    that is a multiple of a row's length would meet one column only.

    >>> places(3, 8).tolist(), len(set((places(64 * 64, 64) % 64).tolist())) > 32
    ([0, 1, 2], True)
    """
    if numel <= size:
        return np.arange(numel, dtype=np.int32)
    at = np.arange(size, dtype=np.int64)
    stretch = numel // size
    return (at * stretch + at * (numel % size) // size + at * LEAP % stretch).astype(np.int32)
