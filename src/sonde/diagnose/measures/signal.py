"""The signal after each layer: how much its outputs still differ between inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.diagnose.measures.model import structure
from sonde.schema.window import Window, noted

EARLY = 20
"""Number of steps that count as the start."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Standard deviation over the batch of the outputs of linear layers and convolutions, in forward order."""

    sites: tuple[str, ...]
    spread: tuple[float, ...]
    """In units of the layer's output, median over the first steps."""
    rms: tuple[float, ...]


def fading(window: Window) -> float:
    """Weakest signal in the second half of the layers divided by the strongest in the first; NaN if unknown."""
    spread = np.asarray(signal(window).spread)
    if len(spread) < 3:
        return float("nan")
    half = len(spread) // 2
    return float(spread[half:].min() / max(spread[:half].max(), 1e-300))


def growth(window: Window) -> float:
    """Root mean square of the last layer's output divided by the first layer's; NaN if unknown."""
    rms = signal(window).rms
    return rms[-1] / max(rms[0], 1e-300) if len(rms) >= 2 else float("nan")


@noted
def signal(window: Window) -> Signal:
    """The signal after each layer at the start of the run; empty if it was not inspected."""
    found: list[tuple[str, float, float]] = []
    for module in structure(window).in_order:
        if module.kind not in ("linear", "conv"):
            continue
        share = early(window, f"unit/{module.name}/batch_std")
        rms = early(window, f"act/{module.name}/rms")
        if np.isfinite(rms) and np.isfinite(share):
            found.append((module.name, share * rms, rms))
    return Signal(*(tuple(column) for column in zip(*found, strict=True))) if found else Signal((), (), ())


def early(window: Window, name: str) -> float:
    """Median over the first steps; NaN if there are no values."""
    steps, values = window.get(name)
    early = values[(steps < EARLY) & np.isfinite(values)]
    return float(np.median(early)) if len(early) else float("nan")
