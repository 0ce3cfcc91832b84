"""A series as one line of blocks. Non-finite values are drawn as crosses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII: Final = "_.-~=+*#"
MISSING: Final = "×"


def sparkline(
    values: ArrayLike, width: int = 16, *, ascii: bool = False, bounds: tuple[float, float] | None = None
) -> str:
    """Draw a series in at most `width` characters, scaled to its extremes or to the given bounds.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    series = np.asarray(values, dtype=np.float64).ravel()
    if not len(series) or width < 1:
        return ""
    blocks, missing = (ASCII, "x") if ascii else (BLOCKS, MISSING)
    heights = _bucket_means(series, min(width, len(series)))
    finite = heights[np.isfinite(heights)]
    if not len(finite):
        return missing * len(heights)
    low, high = bounds or (float(finite.min()), float(finite.max()))
    if high - low < 1e-12 * max(abs(low), abs(high)):  # draw a constant as flat, although its means differ by rounding
        low = high
    return "".join(missing if not np.isfinite(h) else _block(h, low, high, blocks) for h in heights)


def _block(height: float, low: float, high: float, blocks: Sequence[str]) -> str:
    if high == low:
        return blocks[len(blocks) // 2 - 1]
    # Halved, so that the range between two huge numbers of opposite sign does not overflow.
    share = (height / 2 - low / 2) / (high / 2 - low / 2)
    return blocks[min(int(share * len(blocks)), len(blocks) - 1)]


def _bucket_means(series: NDArray[np.float64], num_buckets: int) -> NDArray[np.float64]:
    """Means of equal intervals; one non-finite value marks its whole interval, so that it stays visible."""
    edges = np.linspace(0, len(series), num_buckets + 1).astype(np.intp)
    counts = np.diff(edges)
    with np.errstate(over="ignore", invalid="ignore"):
        means: NDArray[np.float64] = np.add.reduceat(series / np.repeat(counts, counts), edges[:-1])
    return means
