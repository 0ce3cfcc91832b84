"""Fine-tuning costs the model what it could do before: the loss on such data rises while the new data are learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.rule import Found, rule
from sonde.schema.losses import retained_losses
from sonde.schema.window import Window

RISE: Final = 1.1
"""Of the loss before training: noise of an evaluation is a few percent, forgetting is tens."""
MIN_POINTS: Final = 3


@rule(
    references=(
        "McCloskey and Cohen 1989, Catastrophic interference",
        "Biderman et al. 2024, LoRA learns less and forgets less",
    )
)
def forgetting(window: Window) -> Iterator[Found]:
    """The loss on what the model knew before rises while the training loss falls."""
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
            f"what the model could do before gets lost: {name} rose from {values[0]:.3g} to {end:.3g}",
            step=since,
            confidence=0.8,
            evidence=[
                Evidence(name, end / float(values[0]), f"below {RISE:g}", since, "over its value before training")
            ],
            remedy="a lower learning rate, fewer steps, or adapters of a smaller rank; mix in 5 to 10 % of old data.",
        )
