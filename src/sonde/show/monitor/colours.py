"""Colours and shades of the terminal's heatmap: rising brightness, so that shades show the same."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

# Viridis at nine places, as published with matplotlib: even in brightness, told apart by the colour-blind.
_ANCHORS: Final = np.array(
    [
        (68, 1, 84),
        (71, 44, 122),
        (59, 81, 139),
        (44, 113, 142),
        (33, 144, 141),
        (39, 173, 129),
        (92, 200, 99),
        (170, 220, 50),
        (253, 231, 37),
    ],
    np.float64,
)
SHADES: Final = " ░▒▓█"
ASCII_SHADES: Final = " .:=#"
NUM_LEVELS: Final = 32
ODD: Final = "×"


def palette() -> list[str]:
    """`NUM_LEVELS` colours as #rrggbb, dark to bright."""
    places = np.linspace(0, len(_ANCHORS) - 1, NUM_LEVELS)
    channels = [np.interp(places, np.arange(len(_ANCHORS)), _ANCHORS[:, channel]) for channel in range(3)]
    return [f"#{int(r):02x}{int(g):02x}{int(b):02x}" for r, g, b in zip(*channels, strict=True)]


def levels(values: NDArray[np.float64], bounds: tuple[float, float], *, is_log: bool) -> NDArray[np.int64]:
    """Which of `NUM_LEVELS` each value has; -1 for what is missing, and for zero on a log scale the lowest."""
    low, high = bounds
    shown = np.array(values)
    known = np.isfinite(shown)
    if is_log:
        shown = np.log10(np.where(shown > 0, shown, low))
        low, high = np.log10(low), np.log10(high)
    span = high - low
    share = (shown - low) / span if span > 0 else np.full(shown.shape, 0.5)
    share = np.where(known, np.nan_to_num(share), 0.0)
    return np.where(known, np.clip(share * NUM_LEVELS, 0, NUM_LEVELS - 1).astype(np.int64), -1)
