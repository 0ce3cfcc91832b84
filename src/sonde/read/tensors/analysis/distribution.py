"""Distribution of the values of a tensor over time: quantiles, histograms on common bins, KL, Wasserstein-1.

Distances between distributions do not detect values that trade places; evolution.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.tensors.analysis.floats import as_float64
from sonde.schema.sketch import Array

QUANTILES: Final = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
NUM_BINS: Final = 64
PSEUDO_COUNT: Final = 0.5
"""Added to every bin before computing a KL divergence (Krichevsky, Trofimov), so that empty bins keep it finite."""
MAX_SAMPLE: Final = 1 << 20


def sample(values: NDArray[Any], limit: int) -> NDArray[Any]:
    """At most `limit` values, evenly spaced over the tensor, or all of them if there are no more.

    Positions are the same in every snapshot, so that two samples differ only by what changed. The stride is made odd:
    an even one would visit only some columns of a matrix whose width is a power of two. The result is float32 if that
    represents every value, because it sorts twice as fast.
    """
    flat = np.asarray(values).reshape(-1)
    stride = -(-flat.size // limit) if flat.size else 1
    few = flat[:: stride + (stride > 1 and stride % 2 == 0)]
    is_narrow = few.dtype.kind != "c" and few.dtype.itemsize <= 4 and few.dtype not in (np.int32, np.uint32)
    return few.astype(np.float32) if is_narrow else as_float64(few).reshape(-1)


def sorted_finite(values: NDArray[Any]) -> Array:
    """The sorted sample that everything below uses: sorting is expensive and done once."""
    return np.sort(values[np.isfinite(values)]).astype(np.float64)


def common_edges(samples: Sequence[Array], num_bins: int = NUM_BINS) -> Array:
    """Bins of equal width over the values of all snapshots, each sorted."""
    known = [values for values in samples if values.size]
    if not known:
        return np.linspace(0.0, 1.0, num_bins + 1)
    ends = min(values[0] for values in known), max(values[-1] for values in known)
    edges: Array = np.histogram_bin_edges(np.empty(0), num_bins, ends)  # widens a range with a single value
    return edges


def histogram(values: Array, edges: Array) -> NDArray[np.int64]:
    """Counts of sorted values; values outside the edges count in the first and last bin."""
    below = np.searchsorted(values, edges[1:-1], "left")
    counts: NDArray[np.int64] = np.diff(below, prepend=0, append=values.size)
    return counts


def kl_divergence(now: NDArray[np.int64], then: NDArray[np.int64]) -> float:
    """KL(now ‖ then) in nats for two histograms on the same bins, with half a count added to each bin."""
    p, q = now + PSEUDO_COUNT, then + PSEUDO_COUNT
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q)))


def wasserstein(a: Array, b: Array) -> float:
    """Wasserstein-1 distance between two sorted samples, in their own unit: the mean distance that values have moved.

    Exact for samples of any size: the area between the two cumulative distributions.

    >>> import numpy as np
    >>> wasserstein(np.array([0.0, 1.0]), np.array([2.0, 3.0]))
    2.0
    """
    if not a.size or not b.size:
        return float("nan")
    if a.size == b.size:
        return float(np.abs(a - b).mean())
    places = np.sort(np.concatenate((a, b)))
    below_x = np.searchsorted(a, places[:-1], "right") / a.size
    below_y = np.searchsorted(b, places[:-1], "right") / b.size
    return float(np.sum(np.abs(below_x - below_y) * np.diff(places)))


def distribution(samples: Sequence[NDArray[Any]], num_bins: int = NUM_BINS) -> list[dict[str, Any]]:
    """One row per snapshot: moments, quantiles, counts, and distances from the first and the previous snapshot."""
    ordered = [sorted_finite(values) for values in samples]
    edges = common_edges(ordered, num_bins)
    counts = [histogram(values, edges) for values in ordered]
    rows = []
    for place, values in enumerate(ordered):
        rows.append(
            {
                **_moments(values),
                "nonfinite": samples[place].size - values.size,
                "kl_first": kl_divergence(counts[place], counts[0]),
                "kl_previous": kl_divergence(counts[place], counts[place - 1]) if place else None,
                "wasserstein_first": wasserstein(values, ordered[0]),
                "wasserstein_previous": wasserstein(values, ordered[place - 1]) if place else None,
                "counts": counts[place],
                "edges": edges,
            }
        )
    return rows


def _moments(values: Array) -> dict[str, Any]:
    if not values.size:
        return {"mean": None, "std": None, "quantiles": []}
    places = np.array(QUANTILES) * (values.size - 1)
    quantiles = np.interp(places, np.arange(values.size), values)
    return {"mean": float(values.mean()), "std": float(values.std()), "quantiles": quantiles}
