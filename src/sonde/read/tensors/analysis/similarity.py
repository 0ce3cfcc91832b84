"""Similarity of gradients: cosines between steps and between layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.read.tensors.analysis.floats import as_float64
from sonde.schema.sketch import Array


def gram(arrays: Sequence[NDArray[Any]]) -> Array:
    """Dot products of all pairs of snapshots of one block; blocks add up. Non-finite values count as zero."""
    rows = [np.nan_to_num(as_float64(array).reshape(-1), posinf=0.0, neginf=0.0) for array in arrays]
    if len({row.size for row in rows}) > 1:
        return np.full((len(rows), len(rows)), np.nan)
    stacked = np.stack(rows) if rows else np.empty((0, 0))
    product: Array = stacked @ stacked.T
    return product


def cosines(gram: Array) -> Array:
    """Cosine of each pair from their dot products; NaN if a tensor is zero.

    >>> import numpy as np
    >>> cosines(gram([np.array([1.0, 0.0]), np.array([1.0, 1.0])])).round(3)[0, 1]
    np.float64(0.707)
    """
    norms = np.sqrt(np.diag(gram))
    product = np.outer(norms, norms)
    cosine: Array = np.divide(gram, product, out=np.full_like(gram, np.nan), where=product > 0)
    return np.clip(cosine, -1.0, 1.0)


def same_turns(a: Array, b: Array) -> float:
    """Whether two layers turn at the same steps: correlation of their step-by-step cosines.

    This compares layers of different shapes (representational similarity analysis): there is no cosine between their
    gradients, but there is one between the patterns of their cosines. NaN with fewer than three steps.
    """
    above = np.triu_indices(len(a), 1)
    x, y = a[above], b[above]
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if x.size < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def mean_cosine(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> float:
    """Mean over snapshots of the cosine between two tensors of the same shape."""
    found = [cosines(gram(pair))[0, 1] for pair in pairs]
    known = [value for value in found if np.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")
