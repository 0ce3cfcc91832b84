"""The loss swings back up to where it started because steps are large, not because batches differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.motion import NEEDS, motion
from sonde.diagnose.measures.rate import write_rate
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent
from sonde.schema.sketch import Array
from sonde.schema.window import Window

SWING: Final = 0.4
"""Range from the lowest to the highest tenth of the later losses, and rise from the lowest loss so far, as a fraction
of the loss at the start."""
LARGE_STEPS: Final = 0.015
"""Median update relative to the weight matrix. With smaller steps, differences between batches are the cause."""
LARGE_FIRST: Final = 0.3


@rule(
    is_measured=True,
    severity="warning",
    needs=NEEDS,
    causes=("underfitting", "loss_spikes"),
    references=("Zhang et al. 2021, AUTOTRAINER: oscillating loss", "Cohen et al. 2021, edge of stability"),
)
def loss_oscillation(window: Window) -> Iterator[Found]:
    """The loss swings between a low level and its starting value without settling."""
    loss, moved = learned(window), motion(window)
    if loss is None or moved is None or not loss.unit > 0 or loss.has_diverged:
        return
    if not (moved.typical > LARGE_STEPS or moved.at_first > LARGE_FIRST):
        return
    late = loss.values[len(loss.values) // 5 :]
    late = late[np.isfinite(late)]
    low, high = (float(q) for q in np.quantile(late, (0.1, 0.9)) / loss.unit)
    if not (high > 0.9 and high - low > SWING and low < 0.7 * high and loss.left > 0.25):
        return
    if not _rise(late) / loss.unit > SWING:
        return  # the range is that of a loss that is still falling
    yield Found(
        f"The loss swings between {percent(low)} and {percent(high)} of {loss.reference} without settling: a typical "
        f"step changes the weights by {percent(moved.typical)} of their norm.",
        step=int(loss.steps[len(loss.values) // 5]),
        confidence=0.6,
        sites=moved.sites[:1],
        evidence=[
            Evidence(
                loss.name, high - low, "below 0.3", None, f"range of the later losses relative to {loss.reference}"
            ),
            Evidence(
                f"update/{moved.sites[0]}/ratio",
                moved.typical,
                "7e-4 to 2e-2",
                None,
                "update norm / weight norm, median",
            ),
        ],
        remedy=f"{write_rate(window, 0.1)}. Use a momentum of at most 0.9, or larger batches.",
    )


def _rise(values: Array) -> float:
    """How far the highest tenth of these losses is above the lowest loss before it."""
    return float(np.quantile(values - np.minimum.accumulate(values), 0.9))
