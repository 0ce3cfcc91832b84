"""The loss falls abruptly to a far lower level: the targets leaked, the task changed, or the loss is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.rate import rate
from sonde.diagnose.measures.readings import reading
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

BEFORE: Final = 20
AFTER: Final = 10
"""Number of steps compared: the lowest tenth of those before with the highest tenth of those after."""
FACTOR: Final = 3.0
"""Learning lowers a loss by a few percent per step. Of 238 recorded healthy runs and repaired programs, none has fallen
by more than a factor of 2 in one step once 20 steps are over."""
FALL: Final = 0.1
"""Fall as a fraction of the loss of a model that has learned nothing; losses near 0 halve by chance."""
MEASURED: Final = "data/loss/train"
SAME: Final = 0.5
"""Fall of the loss that sonde measured relative to that of the logged one; below it, only the logged one fell."""


@rule(
    severity="warning",
    references=("LayerClaw: loss drops", "Kaufman et al. 2012, Leakage in data mining"),
)
def loss_drop(window: Window) -> Iterator[Found]:
    """The loss falls abruptly to a far lower level, as learning does not."""
    loss = learned(window)
    if loss is None or not loss.unit > 0 or (at := _drop(loss)) is None:
        return
    step = int(loss.steps[at])
    if _rate_changed(window, step):
        return
    before = float(np.median(loss.values[at - BEFORE : at]))
    after = float(np.median(loss.values[at : at + AFTER]))
    is_logged_only = _measured_fall(window, loss, step, before / max(after, 1e-30))
    yield Found(
        f"The loss fell from {number(before)} to {number(after)} at step {step:,}, within one step"
        + (
            ", but the loss that sonde measured did not: the logged value has been computed differently since."
            if is_logged_only
            else ", and stays there: the data, the targets or the loss function changed."
        ),
        step=step,
        confidence=0.9 if is_logged_only else 0.6,
        evidence=[
            reading(window, loss.name, step, f"above {number(before / FACTOR)}", "loss after the drop"),
            reading(window, loss.name, step - 1, "", "loss before the drop"),
        ],
        remedy="Compare the code that computes the logged value before and after this step: a different reduction, "
        "divisor or number of samples."
        if is_logged_only
        else "Compare the batches before and after this step: targets among the inputs, targets that became constant, "
        "or another data set. Compare also how the loss is computed and averaged.",
    )


def _drop(loss: Learned) -> int | None:
    """The index of the first value of the lower level."""
    values = loss.values
    with np.errstate(all="ignore"):
        steep = np.flatnonzero((values[:-1] > FACTOR * values[1:]) & (values[:-1] - values[1:] > FALL * loss.unit)) + 1
    for at in steep[(steep >= BEFORE) & (steep <= len(values) - AFTER)]:
        before, after = values[at - BEFORE : at], values[at : at + AFTER]
        if not np.isfinite(before).all() or not np.isfinite(after).all():
            continue
        if after.min() < 0:
            return None  # a loss without a floor at 0 has no ratios
        low, high = float(np.quantile(before, 0.1)), float(np.quantile(after, 0.9))
        if low > FACTOR * high and low - high > FALL * loss.unit:
            return int(at)
    return None


def _rate_changed(window: Window, step: int) -> bool:
    """Whether the learning rate changed by half or more near a step: a lower rate settles a bouncing loss."""
    steps, values = rate(window)
    near = values[(steps >= step - 3) & (steps <= step)]
    return bool(len(near)) and bool(near.max() > 1.5 * near.min())


def _measured_fall(window: Window, loss: Learned, step: int, factor: float) -> bool:
    """Whether the loss that sonde measured where it is computed did not fall with the logged one."""
    steps, values = window.get(MEASURED)
    if loss.name == MEASURED:
        return False
    before = values[(steps < step) & (steps >= step - 2 * BEFORE) & np.isfinite(values)]
    after = values[(steps >= step) & (steps < step + 2 * BEFORE) & np.isfinite(values)]
    if len(before) < 2 or len(after) < 2 or not np.median(after) > 0:
        return False
    return bool(np.median(before) / np.median(after) < SAME * factor)
