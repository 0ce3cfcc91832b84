"""The result of a coordinate check: how each layer's change scales with the width, as text and as a chart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, Literal

_COLOURS: Final = {"effective": "#0072b2", "propagating": "#d55e00", "total": "#009e73"}
_SIZE, _GAP = 190, 46


Verdict = Literal["stable", "grows", "vanishes", "unclear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The scaling of one part of a layer's change with the width: value ~ width**slope."""

    layer: str
    part: str
    slope: float
    error: float
    """Half the width of the 95 % confidence interval of the slope."""
    verdict: Verdict
    widths: tuple[int, ...]
    values: tuple[float, ...]
    """Mean over seeds, per width."""


@dataclass(frozen=True, slots=True)
class CoordinateReport:
    """Trends of all layers."""

    trends: tuple[Trend, ...]

    @property
    def is_stable(self) -> bool:
        """Whether no layer's change grows with the width."""
        return not any(trend.verdict == "grows" for trend in self.trends)

    def get(self, layer: str, part: str = "effective") -> Trend:
        for trend in self.trends:
            if (trend.layer, trend.part) == (layer, part):
                return trend
        known = sorted({trend.layer for trend in self.trends})
        raise KeyError(f"no layer {layer!r}. Known: {', '.join(known)}")

    def __str__(self) -> str:
        lines = [f"{'layer':32} {'part':12} {'slope':>14}  verdict"]
        for t in self.trends:
            lines.append(f"{t.layer:32} {t.part:12} {t.slope:+7.2f} ± {t.error:4.2f}  {t.verdict}")
        return "\n".join(lines)

    def save_svg(self, path: str | Path) -> Path:
        """An SVG with one small chart per layer, value over width, both logarithmic."""
        target = Path(path)
        target.write_text(_picture(self), encoding="utf-8")
        return target


def _picture(report: CoordinateReport) -> str:
    layers: dict[str, list[Trend]] = {}
    for trend in report.trends:
        layers.setdefault(trend.layer, []).append(trend)
    columns = min(4, max(1, len(layers)))
    rows = math.ceil(len(layers) / columns)
    charts = "".join(
        f'<g transform="translate({(i % columns) * (_SIZE + _GAP) + _GAP},{(i // columns) * (_SIZE + 60) + 30})">'
        f"{_chart(layer, trends)}</g>"
        for i, (layer, trends) in enumerate(layers.items())
    )
    width, height = columns * (_SIZE + _GAP) + _GAP, rows * (_SIZE + 60) + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{charts}</svg>\n'
    )


def _chart(layer: str, trends: list[Trend]) -> str:
    xs = [math.log2(w) for t in trends for w in t.widths]
    ys = [math.log10(v) for t in trends for v in t.values if v > 0]
    low, high = math.floor(min(ys)), math.ceil(max(*ys, math.floor(min(ys)) + 1))
    left, right = min(xs), max(xs)

    def place(width: int, value: float) -> str:
        x = (math.log2(width) - left) / (right - left) * _SIZE
        return f"{x:.1f},{_SIZE - (math.log10(value) - low) / (high - low) * _SIZE:.1f}"

    lines, notes = "", ""
    for number, trend in enumerate(trends):
        colour = _COLOURS.get(trend.part, "#555")
        points = " ".join(place(w, v) for w, v in zip(trend.widths, trend.values, strict=True) if v > 0)
        lines += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        note = escape(f"{trend.part} {trend.slope:+.2f} {trend.verdict}")
        notes += f'<text x="4" y="{14 + 13 * number}" fill="{colour}">{note}</text>'
    ticks = "".join(
        f'<text x="-4" y="{_SIZE - (d - low) / (high - low) * _SIZE + 4:.1f}" text-anchor="end">1e{d}</text>'
        for d in range(low, high + 1)
    )
    ends = (
        f'<text x="0" y="{_SIZE + 14}">{2**left:.0f}</text>'
        f'<text x="{_SIZE}" y="{_SIZE + 14}" text-anchor="end">{2**right:.0f} wide</text>'
    )
    frame = f'<rect width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#999"/>'
    return f'<text y="-6" font-weight="bold">{escape(layer)}</text>{frame}{lines}{notes}{ticks}{ends}'
