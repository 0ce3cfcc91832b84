"""Every stat: a number read from a sketch. Pure functions of `rows` (…, NUM_FIELDS) and `hist` (…, NUM_BINS).

To add a stat, write one decorated function here. If a value does not exist (no finite elements, no histogram taken) a
stat is NaN, never a made-up zero. If a sum overflowed float64 a stat is inf or NaN, never a wrapped number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sonde.schema.old_names import current_stat
from sonde.schema.sketch import (
    COUNTS,
    FIELDS,
    GRAD_MOMENT,
    GRAD_SQ_OVER_V,
    GRAD_UPDATE,
    HIST_N,
    INDEX,
    INF,
    MAX,
    MIN,
    MIN_EXPONENT,
    NAN,
    NUM_BINS,
    SUM,
    SUMABS,
    SUMSQ,
    SUMSQ_RAW,
    ZERO,
    Array,
    N,
    empty_hist,
    empty_rows,
    merge_rows,
)

StatFunction = Callable[[Array, Array], Array]


@dataclass(frozen=True, slots=True)
class Stat:
    """A stat's name, its meaning, and how it is read from a sketch."""

    name: str
    meaning: str
    function: StatFunction
    needs_hist: bool = False

    def of(self, rows: Array, hist: Array) -> Array:
        """The value for each row. Division by an empty count gives NaN on purpose."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.function(rows, hist)


STATS: Final[dict[str, Stat]] = {}


def stat(name: str, *, needs_hist: bool = False) -> Callable[[StatFunction], StatFunction]:
    """Register a stat under its name; its docstring is its meaning."""

    def register(function: StatFunction) -> StatFunction:
        assert name not in STATS, f"two stats named {name}"
        STATS[name] = Stat(name, (function.__doc__ or "").strip(), function, needs_hist)
        return function

    return register


def _finite(rows: Array) -> Array:
    """The number of finite values in the moments; NaN if there are none."""
    count = rows[..., N] - rows[..., NAN] - rows[..., INF]
    finite: Array = np.where(count > 0, count, np.nan)
    return finite


def _where_finite(rows: Array, values: Array) -> Array:
    """NaN if no element is finite: a gradient of nothing but NaN has no norm, least of all 0."""
    kept: Array = np.where(np.isnan(_finite(rows)), np.nan, values)
    return kept


def _field(index: int) -> StatFunction:
    return lambda rows, _hist: rows[..., index]


def _register_fields() -> None:
    meanings = {
        "n": "Number of elements.",
        "nan": "Number of NaN elements.",
        "inf": "Number of infinite elements.",
        "zero": "Number of elements that are exactly zero.",
        "sum": "Sum of the finite elements.",
        "sumsq": "Sum of squares of the finite elements.",
        "sumabs": "Sum of magnitudes of the finite elements.",
        "hist_n": "Number of elements in the histogram; less than n for a sample, 0 when none was taken.",
    }
    for name, meaning in meanings.items():
        STATS[name] = Stat(name, meaning, _field(FIELDS.index(name)))


_register_fields()
assert set(COUNTS) <= set(STATS)


@stat("mean")
def mean(rows: Array, hist: Array) -> Array:
    """Mean of the finite elements."""
    return rows[..., SUM] / _finite(rows)


@stat("var")
def var(rows: Array, hist: Array) -> Array:
    """Population variance of the finite elements; rounding hides a std below about 1e-8 of the rms."""
    count = _finite(rows)
    average = rows[..., SUM] / count
    # Rounding can leave a tiny negative number if all elements are equal.
    return np.maximum(rows[..., SUMSQ] / count - average * average, 0.0)


@stat("std")
def std(rows: Array, hist: Array) -> Array:
    """Population standard deviation of the finite elements."""
    return np.sqrt(var(rows, hist))


@stat("rms")
def rms(rows: Array, hist: Array) -> Array:
    """Root mean square of the finite elements: the norm, independent of the tensor's size."""
    return np.sqrt(rows[..., SUMSQ] / _finite(rows))


@stat("norm")
def norm(rows: Array, hist: Array) -> Array:
    """Euclidean norm of the finite elements."""
    return _where_finite(rows, np.sqrt(rows[..., SUMSQ]))


@stat("abs_mean")
def abs_mean(rows: Array, hist: Array) -> Array:
    """Mean magnitude of the finite elements."""
    return rows[..., SUMABS] / _finite(rows)


@stat("min")
def minimum(rows: Array, hist: Array) -> Array:
    """Smallest finite element."""
    value: Array = np.where(np.isposinf(rows[..., MIN]), np.nan, rows[..., MIN])
    return value


@stat("max")
def maximum(rows: Array, hist: Array) -> Array:
    """Largest finite element."""
    value: Array = np.where(np.isneginf(rows[..., MAX]), np.nan, rows[..., MAX])
    return value


@stat("max_abs")
def max_abs(rows: Array, hist: Array) -> Array:
    """Largest finite magnitude."""
    return np.maximum(np.abs(minimum(rows, hist)), np.abs(maximum(rows, hist)))


@stat("zero_fraction")
def zero_fraction(rows: Array, hist: Array) -> Array:
    """Fraction of elements that are exactly zero."""
    return rows[..., ZERO] / rows[..., N]


@stat("nan_fraction")
def nan_fraction(rows: Array, hist: Array) -> Array:
    """Fraction of elements that are NaN."""
    return rows[..., NAN] / rows[..., N]


@stat("inf_fraction")
def inf_fraction(rows: Array, hist: Array) -> Array:
    """Fraction of elements that are infinite."""
    return rows[..., INF] / rows[..., N]


@stat("nonfinite_fraction")
def nonfinite_fraction(rows: Array, hist: Array) -> Array:
    """Fraction of elements that are NaN or infinite."""
    return (rows[..., NAN] + rows[..., INF]) / rows[..., N]


@stat("rms_over_abs_mean")
def rms_over_abs_mean(rows: Array, hist: Array) -> Array:
    """rms / abs_mean: 1 if all magnitudes are equal, 1.25 for a normal distribution, large if a few dominate."""
    return rms(rows, hist) / abs_mean(rows, hist)


@stat("norm_preclip")
def norm_preclip(rows: Array, hist: Array) -> Array:
    """Norm before gradient clipping; equal to norm if nothing was clipped, NaN if unknown."""
    raw = rows[..., SUMSQ_RAW]
    before = np.sqrt(np.where(np.isnan(raw), rows[..., SUMSQ], raw))
    return _where_finite(rows, np.where(np.isinf(raw), np.nan, before))


@stat("clip_factor")
def clip_factor(rows: Array, hist: Array) -> Array:
    """Factor by which clipping scaled the norm; 1 if nothing was clipped, NaN if unknown."""
    factor = np.where(np.isnan(rows[..., SUMSQ_RAW]), 1.0, norm(rows, hist) / norm_preclip(rows, hist))
    return _where_finite(rows, factor)


@stat("grad_update_dot")
def grad_update_dot(rows: Array, hist: Array) -> Array:
    """<gradient, update>: negative if the step goes downhill. On `update` rows."""
    return rows[..., GRAD_UPDATE]


@stat("grad_moment_dot")
def grad_moment_dot(rows: Array, hist: Array) -> Array:
    """<gradient, first moment>: how far the gradient agrees with its own history. On `update` rows."""
    return rows[..., GRAD_MOMENT]


@stat("second_moment_lag")
def second_moment_lag(rows: Array, hist: Array) -> Array:
    """Mean of gradient**2 / v: near 1 while Adam's v keeps up, large before a loss spike. On `update` rows."""
    return rows[..., GRAD_SQ_OVER_V] / _finite(rows)


def quantile(q: float) -> StatFunction:
    """The q-quantile of |x| over finite elements, including zeros; accurate to the width of a bin, log-linear inside
    it.

    The last bin reaches from 2**15 to the largest magnitude. The first holds everything below 2**-47, so a quantile
    that small only means "at most this".
    """

    def of(rows: Array, hist: Array) -> Array:
        finite = _finite(rows)
        target = q * finite - rows[..., ZERO]  # number of non-zero elements below the quantile
        total = hist.sum(axis=-1)
        share = np.clip(target / (finite - rows[..., ZERO]), 0.0, 1.0) * total
        cumulative = np.cumsum(hist, axis=-1)
        index = np.minimum((cumulative < share[..., None]).sum(axis=-1), NUM_BINS - 1)
        inside = np.take_along_axis(hist, index[..., None], -1)[..., 0]
        below = np.take_along_axis(cumulative, index[..., None], -1)[..., 0] - inside
        largest = max_abs(rows, hist)
        width = np.where(index == NUM_BINS - 1, np.maximum(np.log2(largest) - MIN_EXPONENT - index, 1.0), 1.0)
        exponent = index + MIN_EXPONENT + width * np.where(inside > 0, (share - below) / inside, 0.0)
        value = np.minimum(np.exp2(exponent), largest)
        value = np.where((target <= 0) & (rows[..., ZERO] > 0), 0.0, value)
        result: Array = np.where((total > 0) | ((rows[..., HIST_N] > 0) & (target <= 0)), value, np.nan)
        return result

    of.__doc__ = f"{q:.0%} quantile of the magnitude, from the histogram of exponents."
    return of


for _percent in (1, 5, 25, 50, 75, 95, 99):
    stat(f"abs_q{_percent:02d}", needs_hist=True)(quantile(_percent / 100))


@stat("dynamic_range", needs_hist=True)
def dynamic_range(rows: Array, hist: Array) -> Array:
    """Number of powers of two between the 1 % and the 99 % quantile of the non-zero magnitudes."""
    total = hist.sum(axis=-1)
    cumulative = np.cumsum(hist, axis=-1)
    low = (cumulative < 0.01 * total[..., None]).sum(axis=-1)
    high = (cumulative < 0.99 * total[..., None]).sum(axis=-1)
    spread: Array = np.where(total > 0, (high - low).astype(np.float64), np.nan)
    return spread


def underflow(exponent: int) -> StatFunction:
    """Fraction of the non-zero elements whose magnitude is below 2**exponent."""

    def of(rows: Array, hist: Array) -> Array:
        total = hist.sum(axis=-1)
        below = hist[..., : exponent - MIN_EXPONENT].sum(axis=-1)
        share: Array = np.where(total > 0, below / total, np.nan)
        return share

    of.__doc__ = f"Fraction of the non-zero elements below 2**{exponent}."
    return of


# Below 2**-24 a float16 is zero; below 2**-14 it is denormal and loses precision.
stat("fp16_underflow_fraction", needs_hist=True)(underflow(-24))
stat("below_fp16_normal", needs_hist=True)(underflow(-14))


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
        name = current_stat(name)
        if name not in STATS and name not in INDEX:
            raise AttributeError(name)
        value = float(STATS[name].of(self.rows, self.hist) if name in STATS else self.rows[INDEX[name]])
        return int(value) if name in COUNTS else value
