"""The sketch: sufficient statistics of a tensor that merge. Stores nothing that can be derived (see `stats.py`).

A table of sketches is two arrays: `rows`, float64 of shape (..., NUM_FIELDS), and `hist`, float64 of shape (...,
NUM_BINS). One algebra, `merge`, joins micro-batches, repeated calls, ranks, shards and steps.

Non-finite values are counted (`nan`, `inf`) and left out of everything else. So an infinite `sum`, `sumsq` or `sumabs`
means one thing only: finite elements whose sum float64 cannot represent (squares of 1e300); `min` and `max` stay exact.
A `sum` in which such overflows of both signs meet is NaN: unknown.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Exact counts (below 2**53 a float64 represents them exactly), moments of the finite values, extremes of the finite
# values, the effect of clipping, the sums paired over (grad, update, moments), and the number of elements in the
# histogram.
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
"""Absent (NaN) unless measured in the optimizer pass, in which case they are on the `update` row."""

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
    with np.errstate(over="ignore", invalid="ignore"):
        out = a + b
    out[..., MIN] = np.minimum(a[..., MIN], b[..., MIN])
    out[..., MAX] = np.maximum(a[..., MAX], b[..., MAX])
    out[..., SUMSQ_RAW] = _merge_raw(a, b)
    # A sum over a part is not a sum over the whole: if one side lacks it, so does the result, unless that side is
    # empty.
    a_paired, b_paired, paired = a[..., _PAIRED_COLUMNS], b[..., _PAIRED_COLUMNS], out[..., _PAIRED_COLUMNS]
    paired = np.where(_nothing_to_sum(b, b_paired), a_paired, paired)
    out[..., _PAIRED_COLUMNS] = np.where(_nothing_to_sum(a, a_paired), b_paired, paired)
    return out


def _nothing_to_sum(rows: Array, paired: Array) -> NDArray[np.bool_]:
    """Whether a paired sum is absent because there was nothing to sum."""
    nothing: NDArray[np.bool_] = (rows[..., N, None] == 0) & np.isnan(paired)
    return nothing


def _merge_raw(a: Array, b: Array) -> Array:
    """Without clipping the raw sum of squares is the sum of squares."""
    a_raw, b_raw = a[..., SUMSQ_RAW], b[..., SUMSQ_RAW]
    with np.errstate(over="ignore"):
        total = np.where(np.isnan(a_raw), a[..., SUMSQ], a_raw) + np.where(np.isnan(b_raw), b[..., SUMSQ], b_raw)
    merged: Array = np.where(np.isnan(a_raw) & np.isnan(b_raw), np.nan, total)
    return merged


def merge_groups(rows: Array, starts: NDArray[np.intp]) -> Array:
    """Merge consecutive rows of a (T, NUM_FIELDS) table; group g is rows[starts[g]:starts[g + 1]], none is empty."""
    out = empty_rows(len(starts))
    if not len(starts):
        return out
    with np.errstate(over="ignore", invalid="ignore"):
        out[:, _ADDED] = np.add.reduceat(rows[:, _ADDED], starts, axis=0)
        out[:, MIN] = np.minimum.reduceat(rows[:, MIN], starts)
        out[:, MAX] = np.maximum.reduceat(rows[:, MAX], starts)
        raw = rows[:, SUMSQ_RAW]
        has_raw = np.logical_or.reduceat(~np.isnan(raw), starts)
        total = np.add.reduceat(np.where(np.isnan(raw), rows[:, SUMSQ], raw), starts)
        out[:, SUMSQ_RAW] = np.where(has_raw, total, np.nan)
        paired = rows[:, _PAIRED_COLUMNS]
        nothing = _nothing_to_sum(rows, paired)
        known = np.add.reduceat(np.where(nothing, 0.0, paired), starts, axis=0)
        out[:, _PAIRED_COLUMNS] = np.where(np.logical_and.reduceat(nothing, starts, axis=0), np.nan, known)
    return out
