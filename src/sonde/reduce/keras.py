"""Sketches of Keras tensors by Keras's operations: inside a compiled step of TensorFlow or JAX, or eagerly by torch.

As in `reduce/jax.py` sums are taken of values divided by the largest, in blocks: no square overflows, and rounding
stays below a millionth. Counts are integers. There is no histogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import keras
import numpy as np
from keras import ops

from sonde.schema.sketch import (
    INF,
    MAX,
    MIN,
    NAN,
    NUM_BINS,
    SUM,
    SUMABS,
    SUMSQ,
    ZERO,
    Array,
    N,
    empty_rows,
)

_BLOCK: Final = 1024
Sketch = tuple[Any, Any]
"""Integers: elements, NaN, infinite, zero. Numbers: the largest magnitude, then sum, sum of squares and sum of
magnitudes of values over it, min, max."""


def sketch(x: Any) -> Sketch:
    """(4,) and (6,) of one tensor, whose size need not be known yet."""
    values = _real(x)
    if values.shape[0] == 0:
        return ops.zeros((4,), "int32"), ops.cast(np.array([0, 0, 0, 0, np.inf, -np.inf]), values.dtype)
    is_nan, is_inf = ops.isnan(values), ops.isinf(values)
    finite = ops.logical_not(ops.logical_or(is_nan, is_inf))
    kept = ops.where(finite, values, ops.zeros_like(values))
    low = ops.min(ops.where(finite, values, ops.full_like(values, np.inf)))
    high = ops.max(ops.where(finite, values, ops.full_like(values, -np.inf)))
    scale = ops.where(high >= low, ops.maximum(ops.abs(low), ops.abs(high)), ops.zeros_like(low))
    unit = kept / ops.where(scale > 0, scale, ops.ones_like(scale))
    sums = ops.stack([scale, _sum(unit), _sum(unit * unit), _sum(ops.abs(unit)), low, high])
    is_zero = ops.logical_and(finite, values == 0)
    size = values.shape[0]
    num = _count(ops.ones_like(is_nan)) if size is None else ops.convert_to_tensor(size, "int32")
    counts = ops.stack([num, _count(is_nan), _count(is_inf), _count(is_zero)])
    return counts, sums


def stack(sketches: Sequence[Sketch]) -> Sketch:
    """(T, 4) and (T, 6): few tensors leave the device sooner than many."""
    wide = "float64" if any(keras.backend.standardize_dtype(s.dtype) == "float64" for _, s in sketches) else "float32"
    return ops.stack([c for c, _ in sketches]), ops.stack([ops.cast(s, wide) for _, s in sketches])


def to_rows(counts: Any, sums: Any) -> tuple[Array, Array]:
    """(T, NUM_FIELDS), and no histograms, on the host. This waits for the device."""
    numbers = ops.convert_to_numpy(counts).astype(np.float64)
    scale, total, squares, magnitudes, low, high = ops.convert_to_numpy(sums).astype(np.float64).T
    rows = empty_rows(len(numbers))
    rows[:, [N, NAN, INF, ZERO]] = numbers
    rows[:, SUM], rows[:, SUMSQ], rows[:, SUMABS] = total * scale, squares * scale**2, magnitudes * scale
    has_finite = rows[:, N] > rows[:, NAN] + rows[:, INF]
    rows[has_finite, MIN], rows[has_finite, MAX] = low[has_finite], high[has_finite]
    return rows, np.zeros((0, NUM_BINS))


def _real(x: Any) -> Any:
    """One dimension of real numbers."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if dtype.startswith("complex"):
        x = ops.stack([ops.real(x), ops.imag(x)])
    return ops.reshape(ops.cast(x, "float64" if dtype in ("float64", "complex128") else "float32"), (-1,))


def _count(mask: Any) -> Any:
    return ops.sum(ops.cast(mask, "int32"))


def _sum(values: Any) -> Any:
    """By blocks where the size is known: the error of a long sum grows with its length."""
    size = values.shape[0]
    if size is None or size <= _BLOCK:
        return ops.sum(values)
    padded = ops.pad(values, [[0, math.ceil(size / _BLOCK) * _BLOCK - size]])
    return ops.sum(ops.sum(ops.reshape(padded, (-1, _BLOCK)), axis=1))
