"""The losses of a window, the level of a noisy one, and since when a condition holds. For all rules alike."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.losses import SEEN, training_loss, validation_accuracy, validation_loss
from sonde.schema.names import parse_series
from sonde.schema.sketch import Array
from sonde.schema.window import Column, Window

_MAX_SORTED: Final = 10_000_000
_NUM_WINDOWS: Final = 2_000
_NUM_VALUES: Final = 1_000
_SEEN: Final = {name: parse_series(name) for name in SEEN}


def loss_name(window: Window) -> str | None:
    """The training loss: logged by the user, else seen by sonde."""
    return training_loss(_names(window))


def validation_name(window: Window) -> str | None:
    """The validation loss: logged by the user, else seen by sonde."""
    return validation_loss(_names(window))


def validation(window: Window, what: str = "loss") -> Column:
    """The validation loss, or accuracy (`what="acc"`); empty when there is none."""
    name = validation_name(window) if what == "loss" else validation_accuracy(_names(window))
    return window.get(name or "")


def _names(window: Window) -> list[str]:
    """Scalars with at least one value; what sonde saw itself is stored among the series."""
    logged = [name for name, (steps, _) in window.scalars.items() if len(steps)]
    return [*logged, *(name for name, series in _SEEN.items() if len(window.series.get(series, ((),))[0]))]


def smoothed(values: Array, width: int) -> Array:
    """Running median: a level that single spikes do not move."""
    if len(values) <= width:
        return np.full(1, np.median(values)) if len(values) else values
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    if windows.size <= _MAX_SORTED:
        return np.asarray(np.median(windows, axis=-1))
    # Of a very long run some of the windows, and of each some of its values: medians move slowly.
    at = np.unique(np.linspace(0, len(windows) - 1, _NUM_WINDOWS).astype(np.int64))
    few = windows[at, :: max(width // _NUM_VALUES, 1)]
    return np.asarray(np.interp(np.arange(len(windows)), at, np.median(few, axis=-1)))


def onset(steps: NDArray[np.int64], is_bad: NDArray[np.bool_]) -> int:
    """The step from which on a condition held until the end (a fifth of the values may differ); else its first step."""
    if not is_bad.any():
        return int(steps[0]) if len(steps) else 0
    share = np.cumsum(is_bad[::-1]) / np.arange(1, len(is_bad) + 1)
    lasting = np.flatnonzero((share[::-1] >= 0.8) & is_bad)
    return int(steps[lasting[0]] if len(lasting) else steps[np.flatnonzero(is_bad)[0]])
