"""The signal after each layer: how much its outputs still differ between inputs."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.measures.model import structure
from sonde.schema.window import Window, noted

EARLY = 20
"""Number of steps that count as the start."""


@noted
def fading(window: Window) -> float:
    """Weakest signal in the second half of the layers divided by the strongest in the first; NaN if unknown.

    The signal is the standard deviation over the batch of the outputs of linear layers and convolutions.
    """
    layers = [module.name for module in structure(window).in_order if module.kind in ("linear", "conv")]
    signals = np.array([early(window, f"unit/{name}/batch_std") * early(window, f"act/{name}/rms") for name in layers])
    spread = signals[np.isfinite(signals)]
    if len(spread) < 3:
        return float("nan")
    half = len(spread) // 2
    return float(spread[half:].min() / max(spread[:half].max(), 1e-300))


def early(window: Window, name: str) -> float:
    """Median over the first steps; NaN if there are no values."""
    steps, values = window.get(name)
    early = values[(steps < EARLY) & np.isfinite(values)]
    return float(np.median(early)) if len(early) else float("nan")
