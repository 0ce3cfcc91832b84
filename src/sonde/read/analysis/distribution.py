"""How the values of a tensor are spread, and how that changes: quantiles, histograms on common bins, KL, Wasserstein-1.

Distances in distribution do not see values that trade places; evolution.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.analysis.floats import as_float64
from sonde.schema.sketch import Array

QUANTILES: Final = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
NUM_BINS: Final = 64
PSEUDO_COUNT: Final = 0.5
"""Added to every bin before a KL divergence is taken (Krichevsky, Trofimov): an empty bin must not make it infinite."""
MAX_SAMPLE: Final = 1 << 20


def sample(values: NDArray[Any], limit: int) -> Array:
    """At most `limit` values, evenly spread over the tensor: all of them where they are that few.

    Evenly by position, and the same positions in every snapshot, so that two samples differ only by what changed. The
    stride is made odd: an even one would visit only some columns of a matrix whose width is a power of two.
    """
    flat = np.asarray(values).reshape(-1)
    stride = -(-flat.size // limit) if flat.size else 1
    return as_float64(flat[:: stride + (stride > 1 and stride % 2 == 0)]).reshape(-1)


def common_edges(samples: Sequence[Array], num_bins: int = NUM_BINS) -> Array:
    """Bins of equal width over the finite values of all snapshots."""
    finite = [values[np.isfinite(values)] for values in samples]
    ends = [(values.min(), values.max()) for values in finite if values.size]
    if not ends:
        return np.linspace(0.0, 1.0, num_bins + 1)
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    edges: Array = np.histogram_bin_edges(np.empty(0), num_bins, (low, high))  # widens a range of one value
    return edges


def histogram(values: Array, edges: Array) -> NDArray[np.int64]:
    """Counts of the finite values; those outside the edges are in the first and last bin."""
    finite = values[np.isfinite(values)]
    counts, _ = np.histogram(np.clip(finite, edges[0], edges[-1]), edges)
    return counts


def kl_divergence(now: NDArray[np.int64], then: NDArray[np.int64]) -> float:
    """KL(now ‖ then) in nats, of two histograms on the same bins, with half a count added to each bin."""
    p, q = now + PSEUDO_COUNT, then + PSEUDO_COUNT
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q)))


def wasserstein(a: Array, b: Array) -> float:
    """Wasserstein-1 between the finite values, in their own unit: the mean distance by which values have moved.

    Exact for samples of any two sizes: the area between the two cumulative distributions.

    >>> import numpy as np
    >>> wasserstein(np.array([0.0, 1.0]), np.array([2.0, 3.0]))
    2.0
    """
    x, y = np.sort(a[np.isfinite(a)]), np.sort(b[np.isfinite(b)])
    if not x.size or not y.size:
        return float("nan")
    if x.size == y.size:
        return float(np.abs(x - y).mean())
    places = np.sort(np.concatenate((x, y)))
    below_x = np.searchsorted(x, places[:-1], "right") / x.size
    below_y = np.searchsorted(y, places[:-1], "right") / y.size
    return float(np.sum(np.abs(below_x - below_y) * np.diff(places)))


def distribution(samples: Sequence[Array], num_bins: int = NUM_BINS) -> list[dict[str, Any]]:
    """One row per snapshot: moments, quantiles, counts, and how far it is from the first and from the one before."""
    edges = common_edges(samples, num_bins)
    counts = [histogram(values, edges) for values in samples]
    rows = []
    for place, values in enumerate(samples):
        rows.append(
            {
                **_moments(values),
                "kl_first": kl_divergence(counts[place], counts[0]),
                "kl_previous": kl_divergence(counts[place], counts[place - 1]) if place else None,
                "wasserstein_first": wasserstein(values, samples[0]),
                "wasserstein_previous": wasserstein(values, samples[place - 1]) if place else None,
                "counts": counts[place],
                "edges": edges,
            }
        )
    return rows


def _moments(values: Array) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    is_empty = not finite.size
    return {
        "mean": None if is_empty else float(finite.mean()),
        "std": None if is_empty else float(finite.std()),
        "quantiles": [] if is_empty else np.quantile(finite, QUANTILES),
        "nonfinite": values.size - finite.size,
    }
