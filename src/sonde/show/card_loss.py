"""A loss curve as a small SVG: no spike is lost, a logarithmic axis where it helps, crosses where not finite."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.schema.thinning import min_max
from sonde.show.plot.axes import spans_decades
from sonde.show.summary import SeriesSummary

WIDTH: Final = 480
HEIGHT: Final = 64
POINTS: Final = 200
MARGIN: Final = 4


def loss_picture(loss: SeriesSummary) -> str:
    """The curve; made of numbers alone, so that there is nothing to escape."""
    kept = min_max(loss.steps, loss.values, POINTS)
    steps, values = loss.steps[kept], loss.values[kept]
    is_log = spans_decades([values])
    finite = np.isfinite(values) & ((values > 0) if is_log else True)
    if not finite.any():
        return ""
    heights = np.log10(values[finite]) if is_log else values[finite] / 2  # halved: a span of floats must not overflow
    x = _scaled(steps.astype(np.float64), float(steps[0]), float(steps[-1]), WIDTH)
    y = HEIGHT - _scaled(heights, float(heights.min()), float(heights.max()), HEIGHT)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x[finite], y, strict=True))
    crosses = "".join(
        f'<path d="M{a - 3:.1f} {HEIGHT - 9}l6 6m0-6l-6 6" stroke="#d7263d" stroke-width="1.4"/>'
        for a in x[~np.isfinite(values)][:: max(1, int((~finite).sum()) // 40)]
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="loss over steps{", logarithmic" if is_log else ""}">'
        f'<polyline points="{line}" fill="none" stroke="#2a93b8" stroke-width="1.5"/>'
        f"{crosses}</svg>"
    )


def _scaled(values: np.ndarray, low: float, high: float, size: int) -> np.ndarray:
    """From the margin to the other margin."""
    span = high - low
    share = (values - low) / span if span > 0 else np.full(len(values), 0.5)
    return np.asarray(MARGIN + share * (size - 2 * MARGIN))
