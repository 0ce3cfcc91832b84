"""Evidence held against the recorded series, so that no number contradicts its chart, whichever rule it comes from.

A number with a step is the recorded value at that step. A number without one was computed from the whole series: a
ratio, a count, a median that falls between two values. A healthy range is kept only if the number is outside it.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.schema.window import Window

SAME: Final = 1e-6
NEAR: Final = 0.05
"""Relative distance within which the closest recorded value represents a level such as a median."""
ROUNDING: Final = 0.05
"""Healthy ranges are written with two digits."""
_NUMBER: Final = r"(-?[\d,]*\.?\d+(?:e-?\d+)?)"
_LIMIT: Final = re.compile(rf"(below|above|about) {_NUMBER}")
_BETWEEN: Final = re.compile(rf"{_NUMBER} to {_NUMBER}")
_EXACT: Final = re.compile(_NUMBER)


def grounded(evidence: Evidence, window: Window) -> Evidence:
    """The evidence with a step only where its number was recorded, and with a range only if it is outside.

    >>> loss = Window(scalars={"loss": (np.arange(3), np.array([4.0, 2.0, 1.0]))})
    >>> grounded(Evidence("loss", 2.0, "below 1", 2), loss).step, grounded(Evidence("loss", 0.25, "", 2), loss).step
    (1, None)
    """
    found = _placed(evidence, window)
    return replace(found, healthy="") if is_healthy(found.value, found.healthy) else found


def _placed(evidence: Evidence, window: Window) -> Evidence:
    steps, values = window.get(evidence.series)
    if not len(steps):
        return replace(evidence, step=None) if evidence.step is not None else evidence
    at_step = values[steps == evidence.step] if evidence.step is not None else values[:0]
    if len(at_step) and _is_same(float(at_step[0]), evidence.value):
        return evidence
    known = np.flatnonzero(np.isfinite(values))
    if not len(known) or not math.isfinite(evidence.value):
        return replace(evidence, step=None)
    if evidence.step is not None:
        known = known[np.argsort(np.abs(steps[known] - evidence.step), kind="stable")]
    at = int(known[np.abs(values[known] - evidence.value).argmin()])
    if not math.isclose(float(values[at]), evidence.value, rel_tol=NEAR):
        return replace(evidence, step=None)
    return replace(evidence, value=float(values[at]), step=int(steps[at]))


def _is_same(recorded: float, shown: float) -> bool:
    return math.isclose(recorded, shown, rel_tol=SAME) or (math.isnan(recorded) and math.isnan(shown))


def is_healthy(value: float, healthy: str) -> bool:
    """Whether a value is inside a healthy range written as "below 2", "above 2", "1 to 3", "about 9" or "0".

    >>> [is_healthy(2.3, text) for text in ("below 2", "above 2", "1 to 3", "about 9", "0", "")]
    [False, True, True, False, False, False]
    """
    if limit := _LIMIT.match(healthy):
        bound = float(limit[2].replace(",", ""))
        if limit[1] == "about":
            return math.isclose(value, bound, rel_tol=ROUNDING)
        return value < bound if limit[1] == "below" else value > bound
    if between := _BETWEEN.match(healthy):
        low, high = (float(between[side].replace(",", "")) for side in (1, 2))
        return low <= value <= high
    exact = _EXACT.match(healthy)
    return exact is not None and math.isclose(value, float(exact[0].replace(",", "")))
