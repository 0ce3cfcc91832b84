"""Evolution of a tensor over snapshots: norms, distances and cosines, from sums that add up over blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.tensors.analysis.floats import as_float64
from sonde.schema.sketch import Array

SUMSQ, NONFINITE = 0, 1
PREVIOUS, FIRST = slice(2, 6), slice(6, 10)
"""Sums over pairs with the previous and the first snapshot: squared change, x·y, x², y²."""
NUM_SUMS: Final = 10
COLUMNS: Final = (
    "norm", "from_first", "relative_from_first", "cosine_first", "from_previous", "relative_change",
    "cosine_previous", "nonfinite",
)  # fmt: skip


def evolution_sums(arrays: Iterable[NDArray[Any]]) -> Array:
    """One row of sums per snapshot of one block of a tensor. Cost: one pass, three blocks in memory.

    Non-finite elements are counted and left out, also from pairs. If a snapshot has a different shape from the one it
    is compared with, the result is NaN: the distance does not exist.
    """
    rows: list[Array] = []
    first: Array | None = None
    previous: Array | None = None
    for array in arrays:
        now = as_float64(array)
        first = now if first is None else first
        finite = now.reshape(-1) if np.isfinite(now).all() else now[np.isfinite(now)]
        row = np.full(NUM_SUMS, np.nan)
        row[SUMSQ], row[NONFINITE] = finite @ finite, now.size - finite.size
        if previous is not None:
            row[PREVIOUS] = _pair_sums(now, previous)
        row[FIRST] = _pair_sums(now, first)
        rows.append(row)
        previous = now
    return np.array(rows).reshape(-1, NUM_SUMS)


def _pair_sums(now: Array, then: Array) -> tuple[float, float, float, float]:
    """Sums over elements that are finite in both, so that the norms in a cosine match its dot product."""
    if now.shape != then.shape:
        return (np.nan, np.nan, np.nan, np.nan)
    x, y = now.reshape(-1), then.reshape(-1)
    with np.errstate(invalid="ignore"):
        change = x - y
    if not np.isfinite(change).all():  # inf - inf is NaN, so nothing is missed
        both = np.isfinite(x) & np.isfinite(y)
        x, y = x[both], y[both]
        change = x - y
    # The change itself, not ‖x‖² - 2x·y + ‖y‖², in which small changes would be lost to rounding.
    return float(change @ change), float(x @ y), float(x @ x), float(y @ y)


def evolution_columns(sums: Array) -> dict[str, Array]:
    """The final numbers, one value per snapshot. A ratio to a norm of zero is NaN."""
    columns = (np.sqrt(sums[:, SUMSQ]), *_pair(sums[:, FIRST]), *_pair(sums[:, PREVIOUS]), sums[:, NONFINITE])
    return dict(zip(COLUMNS, columns, strict=True))


def evolution(arrays: Sequence[NDArray[Any]]) -> dict[str, Array]:
    """Norm, distances and cosines of a tensor over its snapshots.

    >>> import numpy as np
    >>> evolution([np.array([3.0, 4.0]), np.array([3.0, 5.0])])["from_first"]
    array([0., 1.])
    """
    return evolution_columns(evolution_sums(arrays))


def _pair(sums: Array) -> tuple[Array, Array, Array]:
    """Distance, distance relative to the earlier norm, cosine."""
    change, dot, now, then = sums.T
    distance = np.sqrt(change)
    return distance, _ratio(distance, np.sqrt(then)), np.clip(_ratio(dot, np.sqrt(now) * np.sqrt(then)), -1.0, 1.0)


def _ratio(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
