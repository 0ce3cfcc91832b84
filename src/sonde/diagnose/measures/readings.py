"""Evidence read off recorded series: each number is a value of its series at the step it names, as in its chart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.schema.sketch import Array
from sonde.schema.window import Window


def reading(window: Window, series: str, step: int, healthy: str = "", meaning: str = "") -> Evidence:
    """The value at a step; if it was not recorded there, the last one before it, else the first."""
    steps, values = window.get(series)
    if not len(steps):
        return Evidence(series, np.nan, healthy, None, meaning)
    at = max(int(np.searchsorted(steps, step, side="right")) - 1, 0)
    return Evidence(series, float(values[at]), healthy, int(steps[at]), meaning)


def typical(
    window: Window, series: str, healthy: str = "", meaning: str = "", *, since: int = 0, until: int | None = None
) -> Evidence:
    """The recorded value closest to the median.

    >>> steps = np.arange(4)
    >>> typical(Window(scalars={"loss": (steps, np.array([9.0, 2.0, 3.0, 4.0]))}), "loss").step
    2
    """
    return _chosen(
        window, series, lambda v: int(np.abs(v - np.median(v)).argmin()), healthy, meaning, since=since, until=until
    )


def highest(
    window: Window, series: str, healthy: str = "", meaning: str = "", *, since: int = 0, until: int | None = None
) -> Evidence:
    """The largest recorded value."""
    return _chosen(window, series, lambda v: int(v.argmax()), healthy, meaning, since=since, until=until)


def lowest(
    window: Window, series: str, healthy: str = "", meaning: str = "", *, since: int = 0, until: int | None = None
) -> Evidence:
    """The smallest recorded value."""
    return _chosen(window, series, lambda v: int(v.argmin()), healthy, meaning, since=since, until=until)


def nearest(window: Window, series: str, value: float, healthy: str = "", meaning: str = "") -> Evidence:
    """The recorded value closest to a level that was computed from several of them."""
    return _chosen(window, series, lambda v: int(np.abs(v - value).argmin()), healthy, meaning)


def _chosen(
    window: Window,
    series: str,
    choose: Callable[[Array], int],
    healthy: str,
    meaning: str,
    *,
    since: int = 0,
    until: int | None = None,
) -> Evidence:
    steps, values = window.get(series)
    usable = np.isfinite(values) & (steps >= since) & (steps <= (window.last_step if until is None else until))
    if not usable.any():
        usable = np.isfinite(values)
    if not usable.any():
        return reading(window, series, since, healthy, meaning)
    at = int(np.flatnonzero(usable)[choose(values[usable])])
    return Evidence(series, float(values[at]), healthy, int(steps[at]), meaning)
