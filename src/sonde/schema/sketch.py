"""The sketch: sufficient statistics of a tensor that merge. Stores nothing that can be derived (see `stats.py`).

A table of sketches is two arrays: `rows`, float64 of shape (..., NUM_FIELDS), and `hist`, float64 of shape
(..., NUM_BINS). One algebra, `merge`, joins micro-batches, repeated calls, ranks, shards and steps.

Non-finite values are counted (`nan`, `inf`) and left out of everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Exact counts (below 2**53 a float64 holds them exactly), moments of the finite values, extremes of the finite values,
# what clipping took away, the sums paired over (grad, update, moments), and how many elements the histogram looked at.
FIELDS: Final = (
    "n", "nan", "inf", "zero",
    "sum", "sumsq", "sumabs",
    "min", "max",
    "sumsq_raw",
    "grad_update", "grad_moment", "grad_sq_over_v",
    "hist_n",
)  # fmt: skip
NUM_FIELDS: Final = len(FIELDS)
INDEX: Final = {name: i for i, name in enumerate(FIELDS)}
COUNTS: Final = ("n", "nan", "inf", "zero", "hist_n")
PAIRED: Final = ("grad_update", "grad_moment", "grad_sq_over_v")
"""Absent (NaN) unless taken in the optimizer pass, in which case they sit on the `update` row."""

NUM_BINS: Final = 64
MIN_EXPONENT: Final = -48
"""Bin i counts finite non-zero values with floor(log2 |x|) == i + MIN_EXPONENT; both ends are clamped."""

N, NAN, INF, ZERO, SUM, SUMSQ, SUMABS, MIN, MAX, SUMSQ_RAW, GRAD_UPDATE, GRAD_MOMENT, GRAD_SQ_OVER_V, HIST_N = range(
    NUM_FIELDS
)
_ADDED: Final = [N, NAN, INF, ZERO, SUM, SUMSQ, SUMABS, HIST_N]
_PAIRED_COLUMNS: Final = [GRAD_UPDATE, GRAD_MOMENT, GRAD_SQ_OVER_V]


def empty_rows(*shape: int) -> Array:
    """Identity sketches: merging one with any sketch gives that sketch."""
    rows = np.zeros((*shape, NUM_FIELDS))
    rows[..., MIN] = np.inf
    rows[..., MAX] = -np.inf
    rows[..., SUMSQ_RAW] = np.nan
    rows[..., _PAIRED_COLUMNS] = np.nan
    return rows


def empty_hist(*shape: int) -> Array:
    return np.zeros((*shape, NUM_BINS))


def merge_rows(a: Array, b: Array) -> Array:
    """Merge two tables row by row. Associative (to rounding) and commutative."""
    out = a + b
    out[..., MIN] = np.minimum(a[..., MIN], b[..., MIN])
    out[..., MAX] = np.maximum(a[..., MAX], b[..., MAX])
    out[..., SUMSQ_RAW] = _merge_raw(a, b)
    # A sum over a part is no sum over the whole: if one side lacks it, so does the result, unless that side is empty.
    a_empty, b_empty = a[..., N, None] == 0, b[..., N, None] == 0
    paired = out[..., _PAIRED_COLUMNS]
    paired = np.where(b_empty, a[..., _PAIRED_COLUMNS], paired)
    out[..., _PAIRED_COLUMNS] = np.where(a_empty, b[..., _PAIRED_COLUMNS], paired)
    return out


def _merge_raw(a: Array, b: Array) -> Array:
    """Without clipping the raw sum of squares is the sum of squares."""
    a_raw, b_raw = a[..., SUMSQ_RAW], b[..., SUMSQ_RAW]
    total = np.where(np.isnan(a_raw), a[..., SUMSQ], a_raw) + np.where(np.isnan(b_raw), b[..., SUMSQ], b_raw)
    merged: Array = np.where(np.isnan(a_raw) & np.isnan(b_raw), np.nan, total)
    return merged


def merge_groups(rows: Array, starts: NDArray[np.intp]) -> Array:
    """Merge consecutive rows of a (T, NUM_FIELDS) table; group g is rows[starts[g]:starts[g + 1]], none of them empty."""
    out = empty_rows(len(starts))
    if not len(starts):
        return out
    out[:, _ADDED] = np.add.reduceat(rows[:, _ADDED], starts, axis=0)
    out[:, MIN] = np.minimum.reduceat(rows[:, MIN], starts)
    out[:, MAX] = np.maximum.reduceat(rows[:, MAX], starts)
    raw = rows[:, SUMSQ_RAW]
    has_raw = np.logical_or.reduceat(~np.isnan(raw), starts)
    total = np.add.reduceat(np.where(np.isnan(raw), rows[:, SUMSQ], raw), starts)
    out[:, SUMSQ_RAW] = np.where(has_raw, total, np.nan)
    empty = rows[:, N, None] == 0
    paired = rows[:, _PAIRED_COLUMNS]
    known = np.add.reduceat(np.where(empty, 0.0, paired), starts, axis=0)
    all_empty = np.logical_and.reduceat(empty, starts, axis=0)
    out[:, _PAIRED_COLUMNS] = np.where(all_empty, np.nan, known)
    return out


@dataclass(frozen=True, slots=True)
class Sketch:
    """One row with names, for reading and for tests; the hot path works on whole tables.

    >>> (Sketch() | Sketch()).n
    0
    """

    rows: Array = field(default_factory=empty_rows)
    hist: Array = field(default_factory=empty_hist)

    def __or__(self, other: Sketch) -> Sketch:
        return Sketch(merge_rows(self.rows, other.rows), self.hist + other.hist)

    def __getattr__(self, name: str) -> float:
        if name in INDEX:
            value = float(self.rows[INDEX[name]])
            return int(value) if name in COUNTS else value
        from sonde.schema.stats import STATS  # a stat is read off the sketch; importing it above would be a circle

        if name in STATS:
            return float(STATS[name].of(self.rows, self.hist))
        raise AttributeError(name)


def merge(a: Sketch, b: Sketch) -> Sketch:
    """The one operation. `merge(a, Sketch())` is `a`."""
    return a | b
