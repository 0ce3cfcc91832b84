"""The loss on held-out data beside the training loss and beside guessing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.learned import learned
from sonde.diagnose.measures.progress import validation
from sonde.schema.sketch import Array
from sonde.schema.window import Window

MIN_POINTS: Final = 3
MANY_POINTS: Final = 18


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Levels of the validation loss, in its own units, which are those of the training loss."""

    steps: NDArray[np.int64]
    values: Array
    best: float
    best_step: int
    end: float
    """Median of the last sixth of the points; of few points, the lower of the last two."""
    train: float
    """Level of the training loss at the end."""
    guessing: float
    """Loss of the best constant answer; NaN when it is not known."""
    accuracy: float
    """Typical accuracy on held-out data, once half of the run is over; NaN when none was logged."""

    @property
    def gap(self) -> float:
        """Validation over training loss, at the end."""
        return self.end / self.train if self.train > 0 else np.inf

    @property
    def turn(self) -> float:
        """How far the validation loss has risen from its best."""
        return self.end / self.best if self.best > 0 else np.nan


def held_out(window: Window) -> HeldOut | None:
    """What validation says; None without at least three values, or where the losses cannot be compared."""
    if "held_out" not in window.notes:
        window.notes["held_out"] = _held_out(window)
    known: HeldOut | None = window.notes["held_out"]
    return known


def _held_out(window: Window) -> HeldOut | None:
    steps, values = validation(window)
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    state = learned(window)
    if len(values) < MIN_POINTS or state is None or state.has_diverged or not state.first > 0:
        return None
    # Sums over sets of different sizes are not to be compared.
    reduction = window.get("data/loss/reduction")[1]
    if len(reduction) and reduction[-1] == 1:
        return None
    accuracy = validation(window, "acc")[1]
    best = int(np.argmin(values))
    return HeldOut(
        steps,
        values,
        best=float(values[best]),
        best_step=int(steps[best]),
        end=float(np.median(values[-(len(values) // 6) :]) if len(values) >= MANY_POINTS else values[-2:].min()),
        train=state.end,
        guessing=state.guessing,
        accuracy=float(np.median(accuracy[len(accuracy) // 2 :])) if np.isfinite(accuracy).any() else np.nan,
    )
