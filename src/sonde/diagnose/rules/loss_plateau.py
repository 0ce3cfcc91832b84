"""The loss has stopped falling well before the end, with much of it left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

FLAT: Final = 0.02
"""Fall over the last half of the run, of the loss at its start."""
UNLEARNED: Final = 0.7


@rule(
    severity="info", references=("Ben Braiek and Khomh 2022, TheDeepChecker: loss falls by less than 5 % per period",)
)
def loss_plateau(window: Window) -> Iterator[Found]:
    """The loss stands still while much of it is left."""
    loss = learned(window)
    if loss is None or not loss.left > UNLEARNED or loss.has_diverged or loss.left > 1.5:
        return
    fall = _late_fall(loss)
    if not abs(fall) < FLAT:
        return
    half = int(loss.steps[len(loss.steps) // 2])
    yield Found(
        f"the loss stands still: {loss.left:.0%} is left, {max(fall, 0.0):.1%} less than at step {half}",
        step=half,
        confidence=0.4,
        evidence=[Evidence(loss.name, fall, "above 0.05", half, "fall over the last half of the run")],
        remedy="try ten times and a tenth of the learning rate; fit one batch, to see whether the model can learn.",
    )


def _late_fall(loss: Learned) -> float:
    late = loss.values[len(loss.values) // 2 :]
    late = late[np.isfinite(late)]
    if len(late) < 10:
        return np.nan
    fifth = max(3, len(late) // 5)
    return float((np.median(late[:fifth]) - np.median(late[-fifth:])) / loss.unit)
