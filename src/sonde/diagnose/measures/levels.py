"""Where a number began and where it ended: medians of the first and of the last values, and since when it was high."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.diagnose.measures.progress import onset
from sonde.schema.window import Column, Window

MIN_SEEN: Final = 6
AT_START: Final = 5


@dataclass(frozen=True, slots=True)
class Levels:
    """One number over a run."""

    start: float
    """Median of the first values."""
    end: float
    """Median of the last quarter."""
    since: int
    """The step since which it has been more than halfway, in orders of magnitude, to its end."""
    late: float
    """Median of the later half."""

    @property
    def growth(self) -> float:
        return self.end / self.start if self.start > 0 else np.inf


def levels(window: Window, name: str, *, min_seen: int = MIN_SEEN) -> Levels | None:
    """Both ends of a number; None when it was seen too rarely."""
    return column_levels(window.get(name), min_seen)


def column_levels(column: Column, min_seen: int = MIN_SEEN) -> Levels | None:
    steps, values = column
    known = np.isfinite(values)
    steps, values = steps[known], values[known]
    if len(values) < min_seen:
        return None
    start, end = float(np.median(values[:AT_START])), float(np.median(values[-max(3, len(values) // 4) :]))
    halfway = np.sqrt(abs(start * end)) if start and end else (start + end) / 2
    since = onset(steps, values >= halfway if end >= start else values <= halfway)
    return Levels(start, end, since, float(np.median(values[len(values) // 2 :])))
