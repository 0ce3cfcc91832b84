"""Whether a run that ended had more to learn: its loss still fell, or its slope promised that it would."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.diagnose.measures.curves import nanmean, nanstd
from sonde.diagnose.measures.loss import Learned

STILL_FALLING: Final = 0.03
"""Improvement of the last quarter over the one before, relative to a constant prediction; such a run is not over."""
PROMISING: Final = 0.05
"""Gain that as many steps again would bring, relative to a constant prediction. A model without positions
promises 0.04 and never gets there."""
CERTAIN: Final = 4.0
"""Slope of the loss relative to its standard error."""
MIN_LATE: Final = 15


def is_improving(state: Learned) -> bool:
    """Whether more steps would have lowered the loss."""
    return _gained(state) > STILL_FALLING or _outlook(state) > PROMISING


def _gained(state: Learned) -> float:
    """Improvement of the last quarter over the one before, beyond the noise of the batches."""
    quarter = len(state.values) // 4
    before, after = state.values[-2 * quarter : -quarter], state.values[-quarter:]
    noise = 2 * float(nanstd(after) / np.sqrt(quarter))
    return (float(nanmean(before) - nanmean(after)) - noise) / state.guessing


def _outlook(state: Learned) -> float:
    """The gain of as many steps again, at the slope of the second half, if that slope is certain."""
    late = state.values[len(state.values) // 2 :]
    late = late[np.isfinite(late)]
    if len(late) < MIN_LATE:
        return 0.0
    at = np.arange(len(late)) - (len(late) - 1) / 2
    slope = float(at @ late) / float(at @ at)
    error = float(np.std(late - late.mean() - slope * at) / np.sqrt(at @ at))
    return -slope * len(state.values) / state.guessing if -slope > CERTAIN * error else 0.0
