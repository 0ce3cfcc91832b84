"""Sketches of JAX arrays, computed in place: inside `jit`, on any device, sharded or not. Nothing waits.

JAX computes in float32 by default, so sums are computed in blocks of values divided by the largest: no square
overflows, and rounding stays below a millionth. Counts are integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from sonde.reduce.exponents import places, scaled
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
    Array,
    N,
    empty_rows,
)

_BLOCK: Final = 1024
_HIST_SAMPLES: Final = 512
_TOGETHER: Final = 1 << 16
"""Maximum number of elements of an array that is concatenated; larger ones are read in place."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "sums", "hist", "is_new"],
    meta_fields=["names", "shapes", "dtypes"],
)
@dataclass(frozen=True)
class Sketches:
    """Sketches of a tree of arrays; a tree itself, so that a jitted function may return it."""

    counts: Any
    """(T, 4) integers: NaN, infinite, zero, in the histogram."""
    sums: Any
    """(T, 6): the largest magnitude, then sum, sum of squares and sum of magnitudes of values over it, min, max."""
    hist: Any
    """(T, NUM_BINS) integers."""
    is_new: Any
    """Whether they belong to the current step: an optimizer may pass on older ones."""
    names: tuple[tuple[str, str], ...]
    """(kind, site) of each."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


def sketch_arrays(named: Iterable[tuple[str, str, Any]]) -> Sketches:
    """Sketches of (kind, site, array). Pure computation; may be called inside or outside `jit`."""
    items = [(kind, site, jnp.asarray(x)) for kind, site, x in named]
    counts, sums, hist = _sketch_all([_real(x) for _, _, x in items]) if items else _nothing()
    return Sketches(
        counts,
        sums,
        hist,
        jnp.asarray(True),
        tuple((kind, site) for kind, site, _ in items),
        tuple(tuple(x.shape) for _, _, x in items),
        tuple(str(x.dtype) for _, _, x in items),
    )


def to_rows(sketches: Sketches) -> tuple[Array, Array] | None:
    """(T, NUM_FIELDS) and (T, NUM_BINS) on the host; None if there is nothing new. This waits for the device."""
    if not bool(sketches.is_new):
        return None
    counts = np.asarray(sketches.counts).astype(np.float64)
    scale, total, squares, magnitudes, low, high = np.asarray(sketches.sums).astype(np.float64).T
    rows = empty_rows(len(sketches.names))
    parts = [2 if dtype.startswith("complex") else 1 for dtype in sketches.dtypes]
    rows[:, N] = [part * math.prod(shape) for part, shape in zip(parts, sketches.shapes, strict=True)]
    rows[:, [NAN, INF, ZERO, HIST_N]] = counts
    rows[:, SUM], rows[:, SUMSQ], rows[:, SUMABS] = total * scale, squares * scale**2, magnitudes * scale
    has_finite = rows[:, N] > rows[:, NAN] + rows[:, INF]
    rows[has_finite, MIN], rows[has_finite, MAX] = low[has_finite], high[has_finite]
    return rows, scaled(np.asarray(sketches.hist).astype(np.float64), rows)


def _nothing() -> tuple[Any, Any, Any]:
    return jnp.zeros((0, 4), jnp.int32), jnp.zeros((0, 6)), jnp.zeros((0, NUM_BINS), jnp.int32)


@jax.jit  # for calls outside jit: operation by operation it takes many times as long
def _sketch_all(arrays: Sequence[Any]) -> list[Any]:
    """Small arrays of one size are sketched together: a compiler takes as long for one operation as for a batched
    one."""
    groups: dict[Any, list[int]] = {}
    for place, values in enumerate(arrays):
        is_small = values.size <= _TOGETHER
        groups.setdefault((values.size, values.dtype) if is_small else place, []).append(place)
    found = [jax.vmap(_sketch)(jnp.stack([arrays[i] for i in group])) for group in groups.values()]
    order = np.argsort([i for group in groups.values() for i in group])
    return [jnp.concatenate(column)[order] for column in zip(*found, strict=True)]


def _sketch(values: Any) -> tuple[Any, Any, Any]:
    is_nan, is_inf = jnp.isnan(values), jnp.isinf(values)
    finite = ~(is_nan | is_inf)
    kept = jnp.where(finite, values, 0)
    scale = jnp.max(jnp.abs(kept), initial=0)
    unit = kept / jnp.where(scale > 0, scale, 1)
    num_zero = jnp.sum(finite & (values == 0), dtype=jnp.int32)
    sums = jnp.stack(
        [
            scale,
            _sum(unit),
            _sum(unit * unit),
            _sum(jnp.abs(unit)),
            jnp.min(jnp.where(finite, values, jnp.inf), initial=jnp.inf),
            jnp.max(jnp.where(finite, values, -jnp.inf), initial=-jnp.inf),
        ]
    )
    hist, looked_at = _histogram(values, finite)
    counts = [jnp.sum(is_nan, dtype=jnp.int32), jnp.sum(is_inf, dtype=jnp.int32), num_zero, jnp.int32(looked_at)]
    return jnp.stack(counts), sums, hist


def _real(x: Any) -> Any:
    """One dimension of real numbers, in the precision that JAX is set to."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    wide = x.dtype if x.dtype == jnp.float64 else jnp.float32
    return x.astype(wide).reshape(-1)


def _sum(values: Any) -> Any:
    """Sum by blocks: the error of a long sum grows with its length."""
    missing = -values.size % _BLOCK
    return jnp.sum(jnp.sum(jnp.pad(values, (0, missing)).reshape(-1, _BLOCK), axis=1))


def _histogram(values: Any, finite: Any) -> tuple[Any, int]:
    """Exponents of a sample, which is the same at every step: a compiled program cannot rotate it."""
    at = places(values.size, _HIST_SAMPLES)
    some, known = values[at], finite[at]
    _, exponent = jnp.frexp(some)
    bins = jnp.clip(exponent - 1 - MIN_EXPONENT, 0, NUM_BINS - 1)
    counted = known & (some != 0)
    hist = jnp.zeros(NUM_BINS, jnp.int32).at[bins].add(counted.astype(jnp.int32))
    return hist, some.size
