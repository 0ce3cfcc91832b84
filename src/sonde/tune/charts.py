"""Pictures for the standard report: lines over steps as SVG, and bars inside a table. Nothing is loaded."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Final

Curve = tuple[list[int], list[float]]
"""Steps and values."""
MAX_POINTS: Final = 400
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 200, 56, 22, 10


def thinned(steps: Sequence[int], values: Sequence[float]) -> Curve:
    """At most so many points; the first and the last stay."""
    last = len(steps) - 1
    places = range(len(steps)) if last < MAX_POINTS else [round(i * last / (MAX_POINTS - 1)) for i in range(MAX_POINTS)]
    return [int(steps[place]) for place in places], [float(values[place]) for place in places]


def line_chart(curves: Mapping[str, Curve]) -> str:
    """Each curve with its name; gaps where there is no number. "" where nothing can be drawn."""
    numbers = [value for _, values in curves.values() for value in values if math.isfinite(value)]
    steps = [step for steps, _ in curves.values() for step in steps]
    if len(numbers) < 2 or max(steps) == min(steps):
        return ""
    low, high = min(numbers), max(numbers)
    high = high if high > low else low + 1.0
    first, last = min(steps), max(steps)

    def place(step: int, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT) * (step - first) / (last - first)
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<polyline class="c{number}" points="{" ".join(part)}"/>'
        for number, (steps, values) in enumerate(curves.values())
        for part in _parts([place(s, v) if math.isfinite(v) else None for s, v in zip(steps, values, strict=True)])
    ]
    names = "".join(f'<span class="c{i}">{html.escape(name)}</span>' for i, name in enumerate(curves))
    floor = _HEIGHT - _BOTTOM
    axes = (
        f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH}"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 8}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{_LEFT - 6}" y="{floor}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">step {first:,}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 5}" text-anchor="end">{last:,}</text>'
    )
    title = html.escape(f"{', '.join(curves)}, steps {first} to {last}, {low:.3g} to {high:.3g}")
    return (
        f'<figure><figcaption>{names}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{title}">{axes}{"".join(lines)}</svg></figure>'
    )


def bar(value: float, largest: float, smallest: float) -> str:
    """A bar for a cell; of values that lie decades apart, by their logarithm."""
    if not (math.isfinite(value) and largest > 0 and value > 0):
        return ""
    share = value / largest
    if smallest > 0 and largest / smallest > 100:
        share = 0.05 + 0.95 * math.log(value / smallest) / math.log(largest / smallest)
    return f'<i class="bar" style="width:{100 * share:.0f}px"></i>'


def _parts(points: Sequence[str | None]) -> list[list[str]]:
    """Runs of points without a gap; one point alone is drawn as a dot."""
    parts: list[list[str]] = [[]]
    for point in points:
        if point is not None:
            parts[-1].append(point)
        elif parts[-1]:
            parts.append([])
    return [part * 2 if len(part) == 1 else part for part in parts if part]
