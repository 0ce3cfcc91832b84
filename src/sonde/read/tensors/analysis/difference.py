"""Differences between two tensors of the same shape, computed in one pass, a few MiB at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.tensors.analysis.floats import as_float64

ELEMENTS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """Sums over pairs of elements; the differences of several tensors can be added."""

    num_elements: int = 0
    num_changed: int = 0
    """Number of elements whose values differ; two NaN are equal."""
    max_abs: float = 0.0
    """The largest difference between finite elements."""
    sumsq: float = 0.0
    """Sum of squared differences of finite elements; the sums below are over finite elements, too."""
    dot: float = 0.0
    sumsq_a: float = 0.0
    sumsq_b: float = 0.0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    nonfinite_changed: int = 0
    """Number of elements that differ and are non-finite in either tensor: no tolerance covers a NaN."""

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.num_elements + other.num_elements,
            self.num_changed + other.num_changed,
            max(self.max_abs, other.max_abs),
            self.sumsq + other.sumsq,
            self.dot + other.dot,
            self.sumsq_a + other.sumsq_a,
            self.sumsq_b + other.sumsq_b,
            self.nonfinite_a + other.nonfinite_a,
            self.nonfinite_b + other.nonfinite_b,
            self.nonfinite_changed + other.nonfinite_changed,
        )

    @property
    def relative(self) -> float:
        """‖b - a‖ / ‖a‖; infinite if a is zero and b is not."""
        if self.sumsq_a > 0:
            return float(np.sqrt(self.sumsq / self.sumsq_a))
        return float("inf") if self.sumsq > 0 else 0.0

    @property
    def cosine(self) -> float:
        norms = float(np.sqrt(self.sumsq_a) * np.sqrt(self.sumsq_b))
        return float(np.clip(self.dot / norms, -1.0, 1.0)) if norms > 0 else float("nan")

    def is_within(self, tolerance: float) -> bool:
        """Whether ‖b - a‖ is at most that fraction of ‖a‖, and no non-finite element differs."""
        return self.relative <= tolerance and not self.nonfinite_changed

    @property
    def changed_fraction(self) -> float:
        return self.num_changed / self.num_elements if self.num_elements else 0.0


def difference(a: NDArray[Any], b: NDArray[Any]) -> Difference:
    """Compute how `b` differs from `a`; dtypes may differ, shapes may not.

    >>> import numpy as np
    >>> difference(np.array([1.0, 2.0]), np.array([1.0, 2.5])).max_abs
    0.5
    """
    assert a.shape == b.shape
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    total = Difference()
    for start in range(0, flat_a.size, ELEMENTS_AT_ONCE):
        part = slice(start, start + ELEMENTS_AT_ONCE)
        total += _block(flat_a[part], flat_b[part])
    return total


def _block(a: NDArray[Any], b: NDArray[Any]) -> Difference:
    exact = a.dtype == b.dtype and a.dtype.kind in "iub"  # int64 has more digits than float64
    x, y = as_float64(a), as_float64(b)
    changed = a != b if exact else (x != y) & ~(np.isnan(x) & np.isnan(y))
    finite_x, finite_y = np.isfinite(x), np.isfinite(y)
    both = finite_x & finite_y
    nonfinite_changed = int((changed & ~both).sum())
    if changed.ndim > 1:  # complex numbers
        changed = changed.any(-1)
    x_both, y_both = x[both], y[both]
    change = y_both - x_both
    return Difference(
        num_elements=a.size,
        num_changed=int(changed.sum()),
        max_abs=float(np.abs(change).max(initial=0.0)),
        sumsq=float(change @ change),
        dot=float(x_both @ y_both),
        sumsq_a=float(x_both @ x_both),
        sumsq_b=float(y_both @ y_both),
        nonfinite_a=int(x.size - finite_x.sum()),
        nonfinite_b=int(y.size - finite_y.sum()),
        nonfinite_changed=nonfinite_changed,
    )
