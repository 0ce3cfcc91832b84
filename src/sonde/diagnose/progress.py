"""Which scalars are the losses, the level of a noisy one, and since when a condition holds. For all rules alike."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array
from sonde.schema.window import Column, Window

_LOSS_NAMES: Final = ("loss", "train_loss", "training_loss", "loss_train")
_OTHER_SETS: Final = ("val", "valid", "validation", "eval", "test", "dev")
RETAINED: Final = frozenset({"retained", "retention", "forgetting", "pretrained", "pretraining"})
"""In the name of a loss: that of data which a model knew before it was fine-tuned, and which are no validation."""
_ACCURACY_NAMES: Final = ("acc", "accuracy", "top1")
_MAX_SORTED: Final = 10_000_000
_NUM_WINDOWS: Final = 2_000
_NUM_VALUES: Final = 1_000
_NOTHING: Final[Column] = (np.empty(0, np.int64), np.empty(0))


def loss_name(window: Window) -> str | None:
    """The logged training loss: `loss`, `train_loss`, `train/loss`; else what the loss function was seen to return."""
    for name in window.scalars:
        words = name.lower().replace("/", "_").split("_")
        if name.lower().rpartition("/")[2] in _LOSS_NAMES and not set(words) & {*_OTHER_SETS, *RETAINED}:
            return name
    return "data/loss/value" if len(window.get("data/loss/value")[0]) else None


def validation(window: Window, what: str = "loss") -> Column:
    """The validation loss, or accuracy (`what="acc"`), as logged; empty when there is none."""
    ends = _LOSS_NAMES if what == "loss" else _ACCURACY_NAMES
    for name, column in window.scalars.items():
        words = name.lower().replace("/", "_").split("_")
        if set(words) & set(_OTHER_SETS) and words[-1] in ends and not set(words) & RETAINED:
            return column
    return _NOTHING


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
