"""Singular values of weight matrices: the largest, effective ranks, and the heaviness of the tail.

Small matrices are exact; for large ones a randomised method computes the largest values only. The result says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array

EXACT_UP_TO: Final = 1024
"""Smaller side up to which the whole spectrum of a matrix is computed; twice the size takes eight times as long."""
OVERSAMPLE: Final = 10
POWER_ITERATIONS: Final = 4
MIN_TAIL: Final = 10
LARGEST: Final = 64
"""Number of singular values of a large matrix if no number is requested."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Singular values in descending order. `is_complete` is false if only the largest few are known."""

    values: Array
    frobenius: float
    is_complete: bool


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """A density λ^-alpha above `x_min`; `ks` is the largest distance between the fit and the data."""

    alpha: float
    x_min: float
    ks: float
    num_tail: int


def as_matrix(tensor: NDArray[Any]) -> Array | None:
    """Reshape to (out, rest) as float64; None for vectors, complex numbers and non-finite values."""
    if tensor.ndim < 2 or 0 in tensor.shape or tensor.dtype.kind == "c":
        return None
    matrix = np.asarray(tensor).reshape(tensor.shape[0], -1).astype(np.float64)
    return matrix if np.isfinite(matrix).all() else None


def spectrum(matrix: Array, k: int | None = 8, *, exact: bool | None = None, seed: int = 0) -> Spectrum:
    """All singular values of a small matrix, the k largest of a large one (None: 64; `exact` computes all).

    Randomised range finder with power iterations (Halko, Martinsson, Tropp 2011) from a separate generator; the
    relative error of the largest values is below 1 % if the spectrum decays at all, and never an overestimate.
    Cost: m·n·min(m, n) exactly, about 10·m·n·(k + 10) otherwise.
    """
    frobenius = float(np.linalg.norm(matrix))
    if min(matrix.shape) <= EXACT_UP_TO if exact is None else exact:
        return Spectrum(_singular_values(matrix), frobenius, is_complete=True)
    k = LARGEST if k is None else k
    width = min(k + OVERSAMPLE, *matrix.shape)
    basis = np.linalg.qr(matrix @ np.random.default_rng(seed).standard_normal((matrix.shape[1], width)))[0]
    for _ in range(POWER_ITERATIONS):
        basis = np.linalg.qr(matrix @ np.linalg.qr(matrix.T @ basis)[0])[0]
    values = _singular_values(basis.T @ matrix)
    return Spectrum(values[:k], frobenius, is_complete=width == min(matrix.shape) and k >= width)


def _singular_values(matrix: Array) -> Array:
    values: Array = np.linalg.svd(matrix, compute_uv=False).astype(np.float64, copy=False)
    return values


def stable_rank(found: Spectrum) -> float:
    """‖W‖F² / σ1²: at most the rank, and not affected by tiny singular values.

    >>> import numpy as np
    >>> round(stable_rank(spectrum(np.eye(5))), 9)
    5.0
    """
    top = found.values[0] if found.values.size else 0.0
    return float((found.frobenius / top) ** 2) if top > 0 else float("nan")


def effective_rank(found: Spectrum) -> float:
    """exp of the entropy of σ / Σσ (Roy and Vetterli 2007); NaN if only the largest values are known."""
    total = found.values.sum()
    if not found.is_complete or not total > 0:
        return float("nan")
    p = found.values / total
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def power_law(found: Spectrum) -> PowerLaw | None:
    """Fit a power law to the tail of the eigenvalues σ² of WᵀW: WeightWatcher's alpha, by its definition.

    For every candidate x_min among the eigenvalues the continuous maximum-likelihood exponent (Hill; Clauset, Shalizi
    and Newman 2009) is alpha = 1 + n / Σ ln(λ / x_min) over the n values from x_min up; the x_min whose fit has the
    smallest Kolmogorov-Smirnov distance wins. None with fewer than 10 values in a tail, or if the spectrum is partial.
    """
    eigenvalues = found.values**2
    eigenvalues = eigenvalues[eigenvalues > eigenvalues[:1].sum() * 1e-14][
        ::-1
    ]  # ascending, without zeros caused by rounding
    if not found.is_complete or eigenvalues.size < MIN_TAIL:
        return None
    logs = np.log(eigenvalues)
    best: PowerLaw | None = None
    for start in range(eigenvalues.size - MIN_TAIL + 1):
        tail = logs[start:] - logs[start]
        total = tail.sum()
        if not total > 0:
            continue
        n = tail.size
        alpha = 1.0 + n / total
        fitted = 1.0 - np.exp(-(alpha - 1.0) * tail)
        measured = np.arange(n) / n
        ks = float(np.maximum(np.abs(fitted - measured), np.abs(fitted - measured - 1 / n)).max())
        if best is None or ks < best.ks:
            best = PowerLaw(float(alpha), float(eigenvalues[start]), ks, n)
    return best


def spectrum_row(
    tensor: NDArray[Any], k: int | None = 8, *, exact: bool | None = None, seed: int = 0
) -> dict[str, Any]:
    """All numbers about one tensor's spectrum; None for those that do not exist or were not computed."""
    matrix = as_matrix(tensor)
    if matrix is None:
        return {}
    found = spectrum(matrix, k, exact=exact, seed=seed)
    tail = power_law(found)
    return {
        "method": "exact" if found.is_complete else "randomized",
        "rows": matrix.shape[0],
        "columns": matrix.shape[1],
        "frobenius": found.frobenius,
        "spectral_norm": float(found.values[0]),
        "stable_rank": stable_rank(found),
        "effective_rank": effective_rank(found),
        "alpha": None if tail is None else tail.alpha,
        "alpha_ks": None if tail is None else tail.ks,
        "alpha_x_min": None if tail is None else tail.x_min,
        "alpha_tail": None if tail is None else tail.num_tail,
        "singular_values": found.values[:k],
    }
