"""The specification: a sketch in plain float64 numpy, obvious and slow. Every faster reducer is compared with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import (
    HIST_N,
    INF,
    MAX,
    MIN,
    MIN_EXPONENT,
    NAN,
    NUM_BINS,
    SUM,
    SUMABS,
    SUMSQ,
    ZERO,
    N,
    empty_hist,
    empty_rows,
)
from sonde.schema.stats import Sketch


def sketch(x: NDArray[Any], *, histogram: bool = True) -> Sketch:
    """Sketch of all elements of an array; the parts of a complex number count as two elements.

    >>> float(sketch(np.array([3.0, 4.0, np.nan])).norm)
    5.0
    """
    flat = _real(np.asarray(x)).ravel().astype(np.float64)
    finite = flat[np.isfinite(flat)]
    rows = empty_rows()
    rows[N] = flat.size
    rows[NAN] = np.isnan(flat).sum()
    rows[INF] = np.isinf(flat).sum()
    rows[ZERO] = (finite == 0).sum()
    # Squares of 1e300 are inf in float64 too: stated, not hidden.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rows[SUM] = finite.sum()
        rows[SUMSQ] = (finite * finite).sum()
        rows[SUMABS] = np.abs(finite).sum()
    if finite.size:
        rows[MIN], rows[MAX] = finite.min(), finite.max()
    hist = empty_hist()
    if histogram:
        rows[HIST_N] = flat.size
        hist += exponent_counts(finite)
    return Sketch(rows, hist)


def exponent_counts(finite: NDArray[np.float64]) -> NDArray[np.float64]:
    """The number of non-zero values in each bin of floor(log2 |x|)."""
    _, exponent = np.frexp(finite[finite != 0])  # |x| = m * 2**e with m in [0.5, 1), so floor(log2 |x|) = e - 1
    bins = np.clip(exponent - 1 - MIN_EXPONENT, 0, NUM_BINS - 1)
    return np.bincount(bins, minlength=NUM_BINS).astype(np.float64)


def _real(x: NDArray[Any]) -> NDArray[Any]:
    return np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x
