"""Values over the steps of a run: levels, trends, and the step since which a condition holds.

The reductions (`nanmean` and so on) ignore NaN without a warning: numpy's own warn when all values are NaN, and
warnings may be errors in the user's program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array
from sonde.schema.window import Column, Window

_MAX_SORTED: Final = 10_000_000
_NUM_WINDOWS: Final = 2_000
_NUM_VALUES: Final = 1_000
MIN_SEEN: Final = 6
_MIN_LASTING: Final = 8
AT_START: Final = 5
Reduction = Callable[..., Any]


def smoothed(values: Array, width: int) -> Array:
    """Running median, which single spikes do not move."""
    if len(values) <= width:
        return np.full(1, np.median(values)) if len(values) else values
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    if windows.size <= _MAX_SORTED:
        return np.asarray(np.median(windows, axis=-1))
    # In a very long run, use some of the windows and some of the values of each: medians change slowly.
    at = np.unique(np.linspace(0, len(windows) - 1, _NUM_WINDOWS).astype(np.int64))
    few = windows[at, :: max(width // _NUM_VALUES, 1)]
    return np.asarray(np.interp(np.arange(len(windows)), at, np.median(few, axis=-1)))


def onset(steps: NDArray[np.int64], is_bad: NDArray[np.bool_]) -> int:
    """The step since which a condition held until the end (for at least 80 % of the values); else its first step."""
    if not is_bad.any():
        return int(steps[0]) if len(steps) else 0
    share = np.cumsum(is_bad[::-1]) / np.arange(1, len(is_bad) + 1)
    lasting = np.flatnonzero((share[::-1] >= 0.8) & is_bad)
    return int(steps[lasting[0]] if len(lasting) else steps[np.flatnonzero(is_bad)[0]])


def held(steps: NDArray[np.int64], own: NDArray[np.int64], values: Array) -> Array:
    """The last value known at each of `steps`; NaN before the first."""
    if not len(own):
        return np.full(len(steps), np.nan)
    place = np.searchsorted(own, steps, side="right") - 1
    return np.asarray(np.where(place >= 0, values[np.maximum(place, 0)], np.nan))


@dataclass(frozen=True, slots=True)
class Levels:
    """Typical values of one series over a run."""

    start: float
    """Median of the first values."""
    end: float
    """Median of the last quarter."""
    since: int
    """The step since which it has been more than halfway to its end, on a logarithmic scale."""
    late: float
    """Median of the second half."""

    @property
    def growth(self) -> float:
        return self.end / self.start if self.start > 0 else np.inf


def levels(window: Window, name: str) -> Levels | None:
    """Levels of a series; None if it has too few values."""
    return column_levels(window.get(name))


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


@dataclass(frozen=True, slots=True)
class Lasting:
    """A site whose value exceeded a limit until the end."""

    site: str
    level: float
    """Median over the second half."""
    since: int
    last: float


def lasting(window: Window, pattern: str, limit: float) -> list[Lasting]:
    """Sites whose value exceeded `limit` in the second half and at the end, in the order of the forward pass."""
    found = []
    for site, steps, values in window.by_site(pattern):
        known = np.isfinite(values)
        steps, values = steps[known], values[known]
        if len(values) < _MIN_LASTING:
            continue
        late = values[len(values) // 2 :]
        since = onset(steps, values > limit)
        # A condition that appeared only near the end has not lasted.
        has_lasted = since <= steps[0] + 0.6 * (steps[-1] - steps[0])
        if has_lasted and np.median(late) > limit and np.median(values[-3:]) > limit:
            found.append(Lasting(site, float(np.median(late)), since, float(values[-1])))
    return found


def _silent(plain: Reduction, without_nan: Reduction) -> Reduction:
    def reduce(values: Any, axis: int | None = None) -> Any:
        array = np.asarray(values, np.float64)
        is_known = ~np.isnan(array)
        if axis is None:
            return float(plain(array[is_known])) if is_known.any() else np.nan
        nothing = ~is_known.any(axis=axis)
        result = np.asarray(without_nan(np.where(np.expand_dims(nothing, axis), 0.0, array), axis=axis))
        return np.where(nothing, np.nan, result)

    return reduce


nanmean: Final = _silent(np.mean, np.nanmean)
nanmedian: Final = _silent(np.median, np.nanmedian)
nanmax: Final = _silent(np.max, np.nanmax)
nanstd: Final = _silent(np.std, np.nanstd)
