"""How much of what distinguishes one input from another is left after each layer: measured on activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sonde.diagnose.measures.model import structure
from sonde.schema.window import Window, noted

EARLY = 20
"""Steps that count as the beginning."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Standard deviation over the batch of the outputs of linear layers and convolutions, from input to output."""

    sites: tuple[str, ...]
    spread: tuple[float, ...]
    """In units of the layer's output, median over the first steps."""
    rms: tuple[float, ...]


def fading(window: Window) -> float:
    """Signal at the weakest place of the second half over the strongest before it; 1: nothing is lost, NaN: unknown."""
    spread = np.asarray(signal(window).spread)
    if len(spread) < 3:
        return float("nan")
    half = len(spread) // 2
    return float(spread[half:].min() / max(spread[:half].max(), 1e-300))


def growth(window: Window) -> float:
    """Root mean square of the last layer's output over that of the first's; NaN: unknown."""
    rms = signal(window).rms
    return rms[-1] / max(rms[0], 1e-300) if len(rms) >= 2 else float("nan")


@noted
def signal(window: Window) -> Signal:
    """The signal after each layer at the beginning of the run; empty when it was not looked at."""
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
    """Median over the first steps; NaN when there is none."""
    steps, values = window.get(name)
    early = values[(steps < EARLY) & np.isfinite(values)]
    return float(np.median(early)) if len(early) else float("nan")
