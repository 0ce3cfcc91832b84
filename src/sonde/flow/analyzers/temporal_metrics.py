"""What is measured of a recurrent layer: the gradient at each time step, its decay, and how far back it reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

REACH: Final = 0.01
"""A time step counts as remembered while its gradient is above this share of the largest."""
MIN_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class TemporalMetrics:
    """Of one recurrent layer."""

    layer: str
    profile: tuple[float, ...]
    """Norm of the gradient at each time step, first to last."""
    decay_rate: float
    """Change of its logarithm per step back in time: negative where it vanishes, positive where it explodes."""
    effective_memory: int
    """How many time steps get more than 1 % of the largest gradient."""
    gates: dict[str, dict[str, float]] = field(default_factory=dict)
    """By gate: norm of gradient, of weight, and their ratio."""

    @staticmethod
    def of(layer: str, profile: Sequence[float], gates: dict[str, dict[str, float]] | None = None) -> TemporalMetrics:
        values = np.asarray(profile, float)
        return TemporalMetrics(layer, tuple(values.tolist()), _decay(values), _memory(values), gates or {})


def _decay(profile: Any) -> float:
    """From the largest gradient (at the end, as a rule) back to the first step."""
    last = int(np.nanargmax(profile)) if np.isfinite(profile).any() else 0
    back = profile[: last + 1][::-1] if last >= len(profile) // 2 else profile
    positive = np.maximum(back, 1e-300)
    if len(back) < 3 or not np.isfinite(positive).all():
        return 0.0
    slope = float(np.polyfit(np.arange(len(back)), np.log(positive), 1)[0])
    return slope if last >= len(profile) // 2 else -slope


def _memory(profile: Any) -> int:
    largest = np.nanmax(profile) if len(profile) else 0.0
    return int((profile > REACH * largest).sum()) if largest > 0 else 0
