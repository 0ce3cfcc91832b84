"""Histograms of binary exponents from samples, on the host; and sample positions that a compiler knows in advance.

Knows no framework.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import INF, MIN_EXPONENT, NAN, NUM_BINS, ZERO, Array, N

LEAP: Final = 40_507
"""A prime: it shares no factor with the length of a row. Times any position in a sample it stays within 32 bits."""

# A float64 begins with its sign and eleven bits of exponent. NaN and infinity share the last exponent; zero and
# subnormal numbers share the first, and nearly all of those are zero.
_MANTISSA_BITS: Final = 52
_NOT_FINITE, _TINY, _NUM_COLUMNS = NUM_BINS, NUM_BINS + 1, NUM_BINS + 2


def _bins_by_exponent() -> NDArray[np.intp]:
    """The column for each sign and exponent."""
    bins = np.clip(np.arange(1 << 11) - 1023 - MIN_EXPONENT, 0, NUM_BINS - 1)
    bins[0], bins[-1] = _TINY, _NOT_FINITE
    return np.concatenate([bins, bins]).astype(np.intp)


_BIN_OF: Final = _bins_by_exponent()


def histograms(samples: NDArray[np.floating], rows: Array) -> Array:
    """(T, NUM_BINS) estimated counts over all elements from a (T, size) table of samples, padded with zeros.

    A sampled count is scaled by (non-zero finite elements / those in the sample), so that histograms of differently
    sampled tensors merge without bias, and a row's histogram adds up to its number of non-zero finite elements.
    """
    bits = np.ascontiguousarray(samples, np.float64).view(np.int64) >> _MANTISSA_BITS
    bits &= len(_BIN_OF) - 1
    bins = _BIN_OF[bits]
    bins += (np.arange(len(samples)) * _NUM_COLUMNS)[:, None]
    counts = np.bincount(bins.ravel(), minlength=len(samples) * _NUM_COLUMNS).reshape(len(samples), _NUM_COLUMNS)
    tiny = counts[:, _TINY].sum() - (samples.size - np.count_nonzero(samples))
    if tiny:
        counts[:, 0] += counts[:, _TINY] - (samples == 0).sum(axis=1)
    return scaled(counts[:, :NUM_BINS].astype(np.float64), rows)


def scaled(counts: Array, rows: Array) -> Array:
    """Scale sampled counts to the number of non-zero finite elements."""
    seen = counts.sum(axis=1)
    there = rows[:, N] - rows[:, NAN] - rows[:, INF] - rows[:, ZERO]
    scale = np.divide(there, seen, out=np.zeros(len(counts)), where=seen > 0)
    found: Array = counts * scale[:, None]
    return found


def places(numel: int, size: int) -> NDArray[np.int32]:
    """The elements to sample: all, or one from each of `size` equal ranges. They are not evenly spaced: a distance that
    is a multiple of a row's length would only hit one column.

    >>> places(3, 8).tolist(), len(set((places(64 * 64, 64) % 64).tolist())) > 32
    ([0, 1, 2], True)
    """
    if numel <= size:
        return np.arange(numel, dtype=np.int32)
    at = np.arange(size, dtype=np.int64)
    stretch = numel // size
    return (at * stretch + at * (numel % size) // size + at * LEAP % stretch).astype(np.int32)
