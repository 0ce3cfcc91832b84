"""The loss stopped falling well before the end, at a high level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent
from sonde.schema.window import Window

FLAT: Final = 0.02
"""Fall over the second half of the run, as a fraction of the loss at its start."""
UNLEARNED: Final = 0.7


@rule(
    severity="info", references=("Ben Braiek and Khomh 2022, TheDeepChecker: loss falls by less than 5 % per period",)
)
def loss_plateau(window: Window) -> Iterator[Found]:
    """The loss has stopped improving at a high level."""
    loss = learned(window)
    if loss is None or not loss.left > UNLEARNED or loss.has_diverged or loss.left > 1.5:
        return
    fall = _late_fall(loss)
    if not abs(fall) < FLAT:
        return
    half = int(loss.steps[len(loss.steps) // 2])
    fallen = f"fallen by only {percent(fall)} of that" if fall > 5e-4 else "not fallen at all"
    yield Found(
        f"The loss has stopped improving ({percent(loss.left)} of {loss.reference}): since step {half:,} it has "
        f"{fallen}.",
        step=half,
        confidence=0.4,
        evidence=[Evidence(loss.name, fall, "above 0.05", half, "relative fall over the second half of the run")],
        remedy="Try ten times the learning rate, and a tenth of it. Fit a single batch to see whether the model can "
        "learn at all.",
    )


def _late_fall(loss: Learned) -> float:
    late = loss.values[len(loss.values) // 2 :]
    late = late[np.isfinite(late)]
    if len(late) < 10:
        return np.nan
    fifth = max(3, len(late) // 5)
    return float((np.median(late[:fifth]) - np.median(late[-fifth:])) / loss.unit)
