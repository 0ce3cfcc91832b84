"""Pressure along the depth, as bars that fill whatever width there is: on a phone the whole model is seen as well."""

from __future__ import annotations

import math
from html import escape
from typing import Final

from sonde.show.flow.metrics import Layer
from sonde.show.flow.result import FlowResult

# The drawing is stretched, so no letters are in it: these stand beside and below.
STYLE: Final = """
.sonde-flow figure { display: grid; grid-template-columns: 2.8rem 1fr; margin: 1rem 0 0; font-size: .8rem;
  color: var(--soft); }
.sonde-flow .axis { position: relative; }
.sonde-flow .axis span { position: absolute; right: .4rem; transform: translateY(-50%); line-height: 1; }
.sonde-flow svg { width: 100%; height: 13rem; display: block; }
.sonde-flow figcaption { grid-column: 2; display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem;
  padding-top: .3rem; }
.sonde-flow .legend { flex-basis: 100%; }
"""
_COLOURS: Final = {"HEALTHY": "var(--fill)", "WARNING": "var(--warn)", "CRITICAL": "var(--bad)"}
_WIDTH: Final = 1000.0
_FURTHEST: Final = 6.0
"""Decades; what is further off is drawn there."""


def depth_picture(report: FlowResult) -> str:
    """Relative pressure, one bar per leaf module, on a logarithmic axis around that near the output."""
    layers = [layer for layer in report.layers if layer.is_leaf]
    if not layers:
        return ""
    decades = [max(-_FURTHEST, min(_FURTHEST, _decades(layer))) for layer in layers]
    low, high = math.floor(min(-1.0, *decades)), math.ceil(max(1.0, *decades))
    step = _WIDTH / len(layers)
    bars = "".join(
        _bar(layer, decade, i * step, step, high) for i, (layer, decade) in enumerate(zip(layers, decades, strict=True))
    )
    lines = "".join(
        f'<path d="M0 {high - decade}H{_WIDTH:g}" stroke="var(--line)" vector-effect="non-scaling-stroke"/>'
        for decade in range(low, high + 1)
    )
    names = "".join(
        f'<span style="top:{100 * (high - decade) / (high - low):.1f}%">{_power(decade)}</span>'
        for decade in range(low, high + 1)
    )
    return (
        f'<figure><div class="axis" aria-hidden="true">{names}</div>'
        f'<svg viewBox="0 0 {_WIDTH:g} {high - low}" preserveAspectRatio="none" role="img" '
        f'aria-label="relative pressure along the depth">{lines}{bars}</svg>'
        "<figcaption><span>input</span><span>output</span>"
        f"{_legend(layers)}</figcaption></figure>"
    )


def _legend(layers: list[Layer]) -> str:
    present = {layer.health.status for layer in layers}
    parts = [f'<span style="color:{c}">■</span> {name.lower()}' for name, c in _COLOURS.items() if name in present]
    return f'<span class="legend">pressure, 1 = as near the output · {" ".join(parts)}</span>'


def _decades(layer: Layer) -> float:
    level = layer.metrics.relative_pressure
    return math.log10(level) if level > 0 else -_FURTHEST


def _power(decade: int) -> str:
    return "1" if decade == 0 else f"1e{decade}"


def _bar(layer: Layer, decade: float, x: float, step: float, high: int) -> str:
    tall = max(abs(decade), 0.04)
    top = high - tall if decade > 0 else high
    title = escape(
        f"{layer.name} ({layer.type}): {layer.metrics.relative_pressure:.2g}, score {layer.health.score:.0f}"
    )
    return (
        f'<rect x="{x + step * 0.1:.2f}" y="{top:.3f}" width="{max(step * 0.8, 0.5):.2f}" height="{tall:.3f}" '
        f'fill="{_COLOURS[layer.health.status]}"><title>{title}</title></rect>'
    )
