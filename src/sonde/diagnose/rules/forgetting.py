"""Fine-tuning makes the model forget what it knew: the loss on the old data rises while the new data are learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.losses import retained_losses
from sonde.schema.window import Window

RISE: Final = 1.1
"""Relative to the loss before training; evaluation noise is a few percent, forgetting is tens of percent."""
MIN_POINTS: Final = 3


@rule(
    references=(
        "McCloskey and Cohen 1989, Catastrophic interference",
        "Biderman et al. 2024, LoRA learns less and forgets less",
    )
)
def forgetting(window: Window) -> Iterator[Found]:
    """The loss on data that the model knew before rises while the training loss falls."""
    state = learned(window)
    for name in retained_losses(window.scalars):
        steps, values = window.scalars[name]
        finite = np.isfinite(values)
        steps, values = steps[finite], values[finite]
        if len(values) < MIN_POINTS or state is None or state.has_diverged or not values[0] > 0:
            continue
        end = float(np.median(values[-max(len(values) // 3, 1) :]))
        if not end > RISE * values[0] or not state.left < 1.0:
            continue
        since = onset(steps, values > RISE * values[0])
        yield Found(
            f"The model has been forgetting what it knew before fine-tuning since step {since:,}: {name} rose from "
            f"{number(float(values[0]), 3)} to {number(end, 3)}.",
            step=since,
            confidence=0.8,
            evidence=[
                Evidence(name, end / float(values[0]), f"below {RISE:g}", since, "loss / its value before training")
            ],
            remedy="Lower the learning rate, train for fewer steps or use adapters of a smaller rank. "
            "Mix in 5 to 10 % of the old data.",
        )
