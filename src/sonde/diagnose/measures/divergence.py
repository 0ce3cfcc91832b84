"""A loss that runs away because steps are too large, up to the overflow that may end it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.motion import Motion, motion
from sonde.diagnose.measures.nonfinite import Moment, first_moment
from sonde.schema.sketch import Array
from sonde.schema.window import Window, noted

LARGE: Final = 0.3
"""Update relative to the weight matrix. Healthy runs stay below 0.1, even in their first steps (348 verified runs)."""
GROWN: Final = 3.0
"""Loss relative to its first value. Overshooting multiplies the loss from step to step, so a runaway soon exceeds any
factor; healthy losses stay below 1.5 times their first value after the first steps."""
RISES: Final = 5
"""Number of first steps that tell how fast the loss grows."""
THROWN: Final = 1.0
"""Update relative to the weight matrix above which a step alone explains an overflow: it replaced the weights."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """How the loss ran away."""

    step: int
    """The first step with a large update."""
    site: str
    """The weight that it moved furthest, relative to its size."""
    size: float
    """Norm of that update divided by the norm of the weight."""
    top: float
    """The highest finite loss, and its step."""
    top_step: int
    growth: float
    """Loss divided by that of the step before, if it grows steadily, as in a quadratic bowl; else NaN."""
    overflow: int | None
    """The step at which a value became non-finite; None if none did."""


@noted
def divergence(window: Window) -> Divergence | None:
    """Measure a divergence; None if the loss did not run away, or if NaN came from elsewhere: the data, or a module
    that was fed ordinary values."""
    loss, moved = learned(window), motion(window)
    if loss is None or moved is None or not loss.first > 0 or len(structure(window).optimizers) > 1:
        return None
    if not loss.has_diverged and not loss.end > GROWN * loss.first:
        return None
    moment = first_moment(window) if loss.has_diverged else None
    if loss.has_diverged and (moment is None or _came_with_data(moment)):
        return None
    return _runaway(loss, moved, moment.step if moment is not None else None)


def _runaway(loss: Learned, moved: Motion, overflow: int | None) -> Divergence | None:
    last = overflow if overflow is not None else int(loss.steps[-1])
    before = (loss.steps <= last) & np.isfinite(loss.values)
    sizes = np.where(moved.steps <= last, moved.largest_of_step, np.nan)
    large = np.flatnonzero(sizes > LARGE)
    if not before.any() or not len(large):
        return None
    top = int(np.argmax(np.where(before, loss.values, -np.inf)))
    has_grown = loss.values[top] > GROWN * loss.first
    if not has_grown and not (overflow is not None and np.fmax.reduce(sizes) > THROWN):
        return None
    if has_grown and moved.steps[large[0]] > loss.steps[top]:
        return None  # the steps became large after the loss: they follow something else
    row = int(np.nanargmax(moved.ratios[:, large[0]]))
    return Divergence(
        int(moved.steps[large[0]]),
        moved.sites[row],
        float(moved.ratios[row, large[0]]),
        float(loss.values[top]),
        int(loss.steps[top]),
        _growth(loss.values[before & (loss.steps >= moved.steps[large[0]])]),
        overflow,
    )


def _growth(values: Array) -> float:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        rises = np.log(values[1:] / values[:-1])[:RISES]
    is_steady = len(rises) == RISES and rises.min() > 0 and rises.max() < 2 * rises.min()
    return float(np.exp(np.median(rises))) if is_steady else np.nan


def _came_with_data(moment: Moment) -> bool:
    return bool(moment.data) or bool(moment.forward.get("came_with_data"))
