"""A series as a small SVG curve. It contains only numbers, so nothing needs escaping."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.schema.thinning import min_max
from sonde.schema.window import Column
from sonde.show.plot.axes import spans_decades

WIDTH: Final = 480
HEIGHT: Final = 64
POINTS: Final = 200
MARGIN: Final = 4


def curve(series: Column, *, span: tuple[int, int] | None = None, colour: str = "#2a93b8") -> str:
    """Draw a series, with crosses for non-finite values; empty if no value is finite. `span` shades its steps."""
    kept = min_max(*series, POINTS)
    steps, values = series[0][kept], series[1][kept]
    is_log = spans_decades([values])
    finite = np.isfinite(values) & ((values > 0) if is_log else True)
    if not finite.any():
        return ""
    heights = np.log10(values[finite]) if is_log else values[finite] / 2  # halved, so that the range cannot overflow
    first, last = float(steps[0]), float(steps[-1])
    x = _scaled(steps.astype(np.float64), first, last, WIDTH)
    y = HEIGHT - _scaled(heights, float(heights.min()), float(heights.max()), HEIGHT)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x[finite], y, strict=True))
    crosses = "".join(
        f'<path d="M{a - 3:.1f} {HEIGHT - 9}l6 6m0-6l-6 6" stroke="#d7263d" stroke-width="1.4"/>'
        for a in x[~np.isfinite(values)][:: max(1, int((~finite).sum()) // 40)]
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="values over steps{", logarithmic" if is_log else ""}">'
        f"{'' if span is None else _shade(span, first, last, colour)}"
        f'<polyline points="{line}" fill="none" stroke="#2a93b8" stroke-width="1.5" '
        f'vector-effect="non-scaling-stroke"/>{crosses}</svg>'
    )


def _shade(span: tuple[int, int], first: float, last: float, colour: str) -> str:
    """A rectangle over the given steps, at least a few pixels wide."""
    ends = np.clip(np.array(span, np.float64), first, last)
    left, right = _scaled(ends, first, last, WIDTH)
    return (
        f'<rect x="{left:.1f}" y="0" width="{max(right - left, 3.0):.1f}" height="{HEIGHT}" fill="{colour}" '
        'fill-opacity="0.15"/>'
    )


def _scaled(values: np.ndarray, low: float, high: float, size: int) -> np.ndarray:
    """Scale values to the range between the margins."""
    span = high - low
    share = (values - low) / span if span > 0 else np.full(len(values), 0.5)
    return np.asarray(MARGIN + share * (size - 2 * MARGIN))
