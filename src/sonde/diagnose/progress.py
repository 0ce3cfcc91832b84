"""What the loss did: where it began, where it is, whether it falls, rises or jumps. Worked out once for all rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array
from sonde.schema.window import Column, Window

_LOSS_NAMES: Final = ("loss", "train_loss", "training_loss", "loss_train")
_OTHER_SETS: Final = ("val", "valid", "validation", "eval", "test", "dev")
_ACCURACY_NAMES: Final = ("acc", "accuracy", "top1")
_NOTHING: Final[Column] = (np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True, slots=True)
class Progress:
    """The training loss, one value per step, with its level at both ends of the run."""

    name: str
    steps: NDArray[np.int64]
    values: Array
    """As logged, NaN and all."""
    start: float
    """Median of the first values: up to five, and no more than a twentieth of the run."""
    end: float
    """Median of the last tenth of the run (at least five values)."""
    best: float
    """Lowest level of a smoothed loss."""
    noise: float
    """Typical jump from value to value, in units of the loss."""

    @property
    def fall(self) -> float:
        """How much of the starting level is gone: 1 is all, 0 nothing, negative: it rose."""
        return (self.start - self.end) / abs(self.start) if self.start else 0.0

    @property
    def finite(self) -> Array:
        return self.values[np.isfinite(self.values)]

    @property
    def has_nonfinite(self) -> bool:
        return bool((~np.isfinite(self.values)).any())


def progress(window: Window) -> Progress | None:
    """What the training loss did; None when no loss was logged or seen."""
    if "progress" not in window.notes:
        window.notes["progress"] = _progress(window)
    known: Progress | None = window.notes["progress"]
    return known


def _progress(window: Window) -> Progress | None:
    name = loss_name(window)
    if name is None:
        return None
    steps, values = window.get(name)
    finite = values[np.isfinite(values)]
    if len(finite) < 5:
        return None
    head = max(1, min(5, len(finite) // 20))
    tail = max(5, len(finite) // 10)
    smooth = smoothed(finite, max(3, len(finite) // 20))
    return Progress(
        name,
        steps,
        values,
        start=float(np.median(finite[:head])),
        end=float(np.median(finite[-tail:])),
        best=float(smooth.min()),
        noise=float(np.median(np.abs(np.diff(finite[len(finite) // 2 :])))) if len(finite) > 4 else 0.0,
    )


def loss_name(window: Window) -> str | None:
    """The logged training loss: `loss`, `train_loss`, `train/loss`; else what the loss function was seen to return."""
    for name in window.scalars:
        words = name.lower().replace("/", "_").split("_")
        if name.lower().rpartition("/")[2] in _LOSS_NAMES and not set(words) & set(_OTHER_SETS):
            return name
    return "data/loss/value" if len(window.get("data/loss/value")[0]) else None


def validation(window: Window, what: str = "loss") -> Column:
    """The validation loss, or accuracy (`what="acc"`), as logged; empty when there is none."""
    ends = _LOSS_NAMES if what == "loss" else _ACCURACY_NAMES
    for name, column in window.scalars.items():
        words = name.lower().replace("/", "_").split("_")
        if set(words) & set(_OTHER_SETS) and words[-1] in ends:
            return column
    return _NOTHING


def smoothed(values: Array, width: int) -> Array:
    """Running median: a level that single spikes do not move."""
    if len(values) <= width:
        return np.full(1, np.median(values)) if len(values) else values
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=-1))


def onset(steps: NDArray[np.int64], is_bad: NDArray[np.bool_]) -> int:
    """The step from which on a condition held until the end (a fifth of the values may differ); else its first step."""
    if not is_bad.any():
        return int(steps[0]) if len(steps) else 0
    share = np.cumsum(is_bad[::-1]) / np.arange(1, len(is_bad) + 1)
    lasting = np.flatnonzero((share[::-1] >= 0.8) & is_bad)
    return int(steps[lasting[0]] if len(lasting) else steps[np.flatnonzero(is_bad)[0]])
