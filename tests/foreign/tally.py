"""Float64 statistics of tensors, written from docs/stats.md and from nothing else: imports no part of sonde.

Every number is computed from all elements in one plain expression. What a run shows is compared with these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

EXACT = 0.0
SQUARES = 1e-11
"""Relative tolerance of a sum of squares and of norms: the order of a float64 summation changes no more than this."""
SUMS = 2e-7
"""Of a sum or a mean, relative to the sum of magnitudes: sonde adds 16 neighbours in float32 before it continues in
float64 (docs/stats.md). The error is about 2e-8 for random numbers, and 1e-6 at worst."""
ROUNDED = 2.0**-23
"""Of what is computed from two float32 numbers and rounded to float32 once: the update, and products with it."""


LEAST_EXPONENT, NUM_EXPONENTS = -48, 64
"""Bins of the histogram, as docs/stats.md has them: the first and the last hold all beyond them."""


class Expected(NamedTuple):
    """A value and the largest absolute difference that rounding explains."""

    value: float
    tolerance: float


def elements(tensors: list[Tensor]) -> Tensor:
    """All elements in float64, one after the other; a complex number is two elements."""
    flat = []
    for tensor in tensors:
        tensor = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce()  # as optimizers do; in which order duplicates are added up can be seen
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        flat.append(tensor.double().reshape(-1))
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Tally:
    """Counts, sums and extremes of one tensor; several calls of a module add up."""

    n: int
    nan: int
    inf: int
    zero: int
    sum: float
    sumsq: float
    sumabs: float
    min: float
    max: float
    fp16_underflow_fraction: int
    below_fp16_normal: int
    exponents: tuple[int, ...]
    """Non-zero elements by floor(log2 |x|), from at most -48 to at least 15."""

    @staticmethod
    def of(tensor: Tensor) -> Tally:
        x = elements([tensor])
        finite = x[torch.isfinite(x)]
        nonzero = finite[finite != 0].abs()
        return Tally(
            n=x.numel(),
            nan=int(torch.isnan(x).sum()),
            inf=int(torch.isinf(x).sum()),
            zero=int((finite == 0).sum()),
            sum=float(finite.sum()),
            sumsq=float(finite.square().sum()),
            sumabs=float(finite.abs().sum()),
            min=float(finite.min()) if finite.numel() else math.inf,
            max=float(finite.max()) if finite.numel() else -math.inf,
            fp16_underflow_fraction=int((nonzero < 2.0**-24).sum()),
            below_fp16_normal=int((nonzero < 2.0**-14).sum()),
            exponents=exponents(nonzero),
        )

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            **{name: getattr(self, name) + getattr(other, name) for name in _ADDED},
            exponents=tuple(a + b for a, b in zip(self.exponents, other.exponents, strict=True)),
            min=min(self.min, other.min),
            max=max(self.max, other.max),
        )

    @property
    def num_finite(self) -> int:
        return self.n - self.nan - self.inf

    @property
    def norm(self) -> float:
        return math.sqrt(self.sumsq) if self.num_finite else math.nan

    def stats(self, *, element: float = EXACT) -> dict[str, Expected]:
        """Every stat that docs/stats.md derives from one tensor, without those of the histogram and of clipping.

        `element` is the relative rounding of each element: zero for what is stored, `ROUNDED` for a difference.
        """
        return {**self._counts(element), **self._moments(element), **self._fractions()}

    def _counts(self, element: float) -> dict[str, Expected]:
        found = {name: Expected(getattr(self, name), EXACT) for name in ("n", "nan", "inf", "zero")}
        found["sum"] = Expected(self.sum, (SUMS + element) * self.sumabs)
        found["sumsq"] = Expected(self.sumsq, (SQUARES + 2 * element) * self.sumsq)
        found["sumabs"] = Expected(self.sumabs, (SUMS + element) * self.sumabs)
        return found

    def _moments(self, element: float) -> dict[str, Expected]:
        count = self.num_finite
        if not count:
            return {name: Expected(math.nan, EXACT) for name in _MOMENTS}
        mean, square, magnitude = self.sum / count, self.sumsq / count, self.sumabs / count
        var, rms = max(square - mean * mean, 0.0), math.sqrt(square)
        sums, squares = SUMS + element, SQUARES + element
        # A difference: what rounding leaves of it is relative to its two parts.
        var_tolerance = 2 * squares * square + 2 * abs(mean) * sums * magnitude
        std_tolerance = min(math.sqrt(var_tolerance), var_tolerance / math.sqrt(var) if var else math.inf)
        extremes = {"min": self.min, "max": self.max, "max_abs": max(abs(self.min), abs(self.max))}
        proxy = rms / magnitude if magnitude else math.nan
        return {
            "mean": Expected(mean, sums * magnitude),
            "var": Expected(var, var_tolerance),
            "std": Expected(math.sqrt(var), std_tolerance),
            "rms": Expected(rms, squares * rms),
            "norm": Expected(self.norm, squares * self.norm),
            "abs_mean": Expected(magnitude, sums * magnitude),
            "rms_over_abs_mean": Expected(proxy, 2 * sums * proxy),
            **{name: Expected(value, element * abs(value)) for name, value in extremes.items()},
        }

    def _fractions(self) -> dict[str, Expected]:
        counts = {
            "zero_fraction": self.zero,
            "nan_fraction": self.nan,
            "inf_fraction": self.inf,
            "nonfinite_fraction": self.nan + self.inf,
        }
        return {name: Expected(k / self.n if self.n else math.nan, 1e-15) for name, k in counts.items()}

    def quantile(self, share: float, *, of_nonzero: bool = False) -> tuple[float, float]:
        """Between what a quantile of |x| lies, if no more is known of an element than its binary exponent; which of two
        elements next to each other it is, is left open."""
        zeros = 0 if of_nonzero else self.zero
        last = zeros + sum(self.exponents) - 1
        rank = share * last
        low, high = (self._within(min(max(place - zeros, -1), last)) for place in (int(rank) - 1, int(rank) + 2))
        return low[0], high[1]

    def _within(self, rank: int) -> tuple[float, float]:
        """Of a non-zero element by its rank; before the first there are zeros."""
        if rank < 0:
            return 0.0, 0.0
        largest, passed = max(abs(self.min), abs(self.max)), 0
        for place, count in enumerate(self.exponents):
            passed += count
            if rank < passed:
                lower = 0.0 if place == 0 else 2.0 ** (place + LEAST_EXPONENT)
                return lower, largest if place == NUM_EXPONENTS - 1 else 2.0 ** (place + LEAST_EXPONENT + 1)
        return largest, largest

    def histogram_stats(self) -> dict[str, Expected]:
        """Of a histogram of all elements: quantiles are right to the width of a bin, a factor of two."""
        count = sum(self.exponents)
        if not count:
            return {}
        found = {f"abs_q{q:02}": _between(*self.quantile(q / 100)) for q in (1, 5, 25, 50, 75, 95, 99)}
        found["fp16_underflow_fraction"] = Expected(self.fp16_underflow_fraction / count, 1e-12)
        found["below_fp16_normal"] = Expected(self.below_fp16_normal / count, 1e-12)
        return found


def _between(low: float, high: float) -> Expected:
    return Expected((low + high) / 2, (high - low) / 2 + ROUNDED * high)


def exponents(magnitudes: Tensor) -> tuple[int, ...]:
    """How many of these there are for each binary exponent."""
    _, above = torch.frexp(magnitudes)  # |x| = m * 2**e with m in [0.5, 1)
    places = (above - 1 - LEAST_EXPONENT).clamp(0, NUM_EXPONENTS - 1)
    return tuple(torch.bincount(places.reshape(-1).long(), minlength=NUM_EXPONENTS).tolist())


_ADDED = ("n", "nan", "inf", "zero", "sum", "sumsq", "sumabs", "fp16_underflow_fraction", "below_fp16_normal")


_MOMENTS = ("mean", "var", "std", "rms", "norm", "abs_mean", "min", "max", "max_abs", "rms_over_abs_mean")


def dot(a: Tensor, b: Tensor) -> Expected:
    """<a, b>; NaN if there are no elements."""
    products = elements([a]) * elements([b])
    if not products.numel():
        return Expected(math.nan, EXACT)
    return Expected(float(products.sum()), ROUNDED * float(products.abs().sum()))


def added(parts: Iterable[Expected]) -> Expected:
    """Their sum."""
    listed = list(parts)
    return Expected(sum(part.value for part in listed), sum(part.tolerance for part in listed))


def second_moment_lag(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Expected:
    """Mean of grad² / v, where v is Adam's second moment, corrected for its bias and never below eps²."""
    correction = 1.0 - float(group["betas"][1]) ** float(state["step"])
    v = (elements([state["exp_avg_sq"]]) / correction).clamp(min=float(group["eps"]) ** 2)
    lag = float((elements([grad]).square() / v).mean())
    return Expected(lag, 4 * ROUNDED * lag)
