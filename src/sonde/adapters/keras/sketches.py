"""Sketches of Keras tensors with Keras operations, inside a compiled step of TensorFlow, JAX or torch.

As in `adapters/jax/sketches.py` sums are computed in blocks of values divided by the largest: no square overflows, and
rounding stays below a millionth. Counts are integers. Small tensors of one size are sketched together: a compiler takes
as long for one operation as for a batched one. Histograms are computed on the host, from a sample that is the same at
every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import keras
import numpy as np
from keras import ops

from sonde.reduce.exponents import LEAP, histograms, places
from sonde.schema.sketch import (
    HIST_N,
    INF,
    MAX,
    MIN,
    NAN,
    NUM_BINS,
    SUM,
    SUMABS,
    SUMSQ,
    SUMSQ_RAW,
    ZERO,
    Array,
    N,
    empty_rows,
)

_BLOCK: Final = 1024
_TOGETHER: Final = 1 << 16
"""Maximum number of elements of a tensor that is concatenated; larger ones are read in place."""
Sketches = tuple[Any, Any, Any]
"""Integers (T, 4): elements, NaN, infinite, zero. Numbers (T, 6): the largest magnitude, then sum, sum of squares and
sum of magnitudes of values over it, min, max. And a sample (T, size), padded with zeros."""


def sketch_all(tensors: Sequence[Any], samples: int) -> Sketches:
    """Sketches of tensors, whose sizes need not be known yet."""
    groups: dict[Any, list[int]] = {}
    flat = [_real(x) for x in tensors]
    for place, values in enumerate(flat):
        size = values.shape[0]
        is_small = size is not None and 0 < size <= _TOGETHER
        groups.setdefault((size, values.dtype) if is_small else place, []).append(place)
    found = [_sketch(ops.stack([flat[i] for i in group]), samples) for group in groups.values()]
    order = np.argsort([i for group in groups.values() for i in group]).astype("int32")
    wide = "float64" if any(keras.backend.standardize_dtype(s.dtype) == "float64" for _, s, _ in found) else "float32"
    counts, sums, sampled = zip(*found, strict=True)
    return (
        ops.take(ops.concatenate(counts), order, axis=0),
        ops.take(ops.concatenate([ops.cast(s, wide) for s in sums]), order, axis=0),
        ops.take(ops.concatenate([ops.cast(s, wide) for s in sampled]), order, axis=0),
    )


def to_rows(sketches: Sketches, *, raws: Sequence[int] = (), histogram: bool = True) -> tuple[Array, Array]:
    """(T, NUM_FIELDS) and (T, NUM_BINS), or no histograms, on the host. This waits for the device.

    `raws`: the last sketches are of gradients before clipping, for these rows.
    """
    rows, hist = _rows(*sketches, histogram)
    num = len(rows) - len(raws)
    rows[list(raws), SUMSQ_RAW] = rows[num:, SUMSQ]
    return rows[:num], hist[:num]


def _rows(counts: Any, sums: Any, sampled: Any, histogram: bool) -> tuple[Array, Array]:
    numbers = ops.convert_to_numpy(counts).astype(np.float64)
    scale, total, squares, magnitudes, low, high = ops.convert_to_numpy(sums).astype(np.float64).T
    rows = empty_rows(len(numbers))
    rows[:, [N, NAN, INF, ZERO]] = numbers
    rows[:, SUM], rows[:, SUMSQ], rows[:, SUMABS] = total * scale, squares * scale**2, magnitudes * scale
    has_finite = rows[:, N] > rows[:, NAN] + rows[:, INF]
    rows[has_finite, MIN], rows[has_finite, MAX] = low[has_finite], high[has_finite]
    if not histogram:
        return rows, np.zeros((0, NUM_BINS))
    table = ops.convert_to_numpy(sampled)
    rows[:, HIST_N] = np.minimum(rows[:, N], table.shape[1])
    return rows, histograms(table, rows)


def _sketch(values: Any, samples: int) -> Sketches:
    """Sketches of the rows of a (T, size) table."""
    size = values.shape[1]
    if size == 0:
        num = values.shape[0]
        nothing = ops.cast(np.tile(np.array([0, 0, 0, 0, np.inf, -np.inf]), (num, 1)), values.dtype)
        return ops.zeros((num, 4), "int32"), nothing, ops.zeros((num, samples), values.dtype)
    is_nan, is_inf = ops.isnan(values), ops.isinf(values)
    finite = ops.logical_not(ops.logical_or(is_nan, is_inf))
    kept = ops.where(finite, values, ops.zeros_like(values))
    low = ops.min(ops.where(finite, values, ops.full_like(values, np.inf)), axis=1)
    high = ops.max(ops.where(finite, values, ops.full_like(values, -np.inf)), axis=1)
    scale = ops.where(high >= low, ops.maximum(ops.abs(low), ops.abs(high)), ops.zeros_like(low))
    unit = kept / ops.where(scale > 0, scale, ops.ones_like(scale))[:, None]
    sums = ops.stack([scale, _sum(unit), _sum(unit * unit), _sum(ops.abs(unit)), low, high], axis=1)
    is_zero = ops.logical_and(finite, values == 0)
    num = _count(ops.ones_like(is_nan)) if size is None else ops.full(values.shape[:1], size, "int32")
    counts = ops.stack([num, _count(is_nan), _count(is_inf), _count(is_zero)], axis=1)
    return counts, sums, _sample(values, samples)


def _real(x: Any) -> Any:
    """One dimension of real numbers."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if dtype.startswith("complex"):
        x = ops.stack([ops.real(x), ops.imag(x)])
    return ops.reshape(ops.cast(x, "float64" if dtype in ("float64", "complex128") else "float32"), (-1,))


def _count(mask: Any) -> Any:
    return ops.sum(ops.cast(mask, "int32"), axis=1)


def _sum(values: Any) -> Any:
    """Sum by blocks if the size is known: the error of a long sum grows with its length."""
    size = values.shape[1]
    if size is None or size <= _BLOCK:
        return ops.sum(values, axis=1)
    num_blocks = math.ceil(size / _BLOCK)
    padded = ops.pad(values, [[0, 0], [0, num_blocks * _BLOCK - size]])
    return ops.sum(ops.sum(ops.reshape(padded, (-1, num_blocks, _BLOCK)), axis=2), axis=1)


def _sample(values: Any, samples: int) -> Any:
    size = values.shape[1]
    if size is None:
        return _sample_unknown(values, samples)
    if size > samples:
        return ops.take(values, places(size, samples), axis=1)
    return ops.pad(values, [[0, 0], [0, samples - size]])


def _sample_unknown(values: Any, samples: int) -> Any:
    """Like `places`, for a compiler that learns the size at run time."""
    size = ops.cast(ops.shape(values)[1], "int32")
    at = ops.convert_to_tensor(np.arange(samples, dtype=np.int32))
    stretch = ops.maximum(size // samples, 1)
    rest = ops.where(size > samples, size % samples, 0)
    index = at * stretch + at * rest // samples + ops.mod(at * LEAP, stretch)

    def some() -> Any:
        found = ops.take(values, ops.minimum(index, size - 1), axis=1)
        return ops.where(at < size, found, ops.zeros_like(found))  # if there are fewer, each is counted once

    def none() -> Any:
        return ops.zeros((values.shape[0], samples), values.dtype)

    return ops.cond(size > 0, some, none)
