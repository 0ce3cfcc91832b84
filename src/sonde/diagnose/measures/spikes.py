"""Where the loss jumps far out of its own recent range and scale, and comes back or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.diagnose.measures.learned import Learned
from sonde.schema.sketch import Array

BACK: Final = 20
"""Steps that make up the recent range."""
MIN_BACK: Final = 8
SKIP: Final = 10
"""The first steps are no measure of what is usual."""
APART: Final = 5
"""Jumps closer together than this are one."""


@dataclass(frozen=True, slots=True)
class Spike:
    """One jump of the loss."""

    index: int
    """Its place among the values of the loss."""
    step: int
    height: float
    """The value over the recent median."""


def find_spikes(loss: Learned, *, spreads: float = 8.0, times: float = 2.0, share: float = 0.2) -> list[Spike]:
    """Values above the recent median by many times the recent spread, by a factor, and by a share of the starting loss.

    All three, because each alone happens in healthy runs: small batches have wide spreads, losses near zero double.
    """
    found: list[Spike] = []
    last = -APART - 1
    for index in _candidates(loss.values, times, share * loss.unit):
        recent = loss.values[max(0, index - BACK) : index]
        recent = recent[np.isfinite(recent)]
        if len(recent) < MIN_BACK:
            continue
        level, value = float(np.median(recent)), float(loss.values[index])
        is_jump = value - level > max(spreads * _spread(recent), share * loss.unit) and value > times * level
        if is_jump and index - last > APART:
            found.append(Spike(index, int(loss.steps[index]), value / max(level, 1e-30)))
        if is_jump:
            last = index
    return found


def _candidates(values: Array, times: float, gap: float) -> list[int]:
    """Where a jump is possible at all. A median is at least the minimum, and the minimum is cheap: medians of every
    step would be most of the cost of all rules together."""
    if len(values) <= SKIP:
        return []
    padded = np.concatenate([np.full(BACK, np.inf), np.where(np.isfinite(values), values, np.inf)])
    low = np.lib.stride_tricks.sliding_window_view(padded, BACK).min(axis=-1)[: len(values)]
    with np.errstate(invalid="ignore"):
        is_above = np.isfinite(values) & np.isfinite(low) & (values - low > gap) & (values > times * low)
    return [int(index) for index in np.flatnonzero(is_above[SKIP:]) + SKIP]


def _spread(values: Array) -> float:
    low, high = np.quantile(values, (0.1, 0.9))
    return float(high - low)
