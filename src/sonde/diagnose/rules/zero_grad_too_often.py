"""Gradients are cleared between the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import seen
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MOST: Final = 0.5
"""Fraction of the steps in which it must happen; single ones are the end of an epoch."""
MIN_STEPS: Final = 5


@rule(
    causes=("gradient_noise", "lr_too_low", "underfitting", "loss_oscillation", "loss_plateau", "lr_too_high"),
    references=("PyTorch documentation: gradient accumulation in AMP examples",),
)
def zero_grad_too_often(window: Window) -> Iterator[Found]:
    """Gradients are cleared between micro-batches, so most of each step's data is computed for nothing."""
    num, cleared = seen(window, "data/batch/micro_batches"), seen(window, "data/batch/cleared")
    if len(num) < MIN_STEPS or len(num) != len(cleared):
        return
    is_lost = cleared.values > 0
    if not is_lost.mean() > MOST:
        return
    typical, lost = int(np.median(num.values)), int(np.median(cleared.values[is_lost]))
    step = int(num.steps[is_lost][0])
    yield Found(
        f"Of the {typical} micro-batches of a step, the gradients of {lost} are cleared before the optimizer uses "
        f"them: a step learns from {typical - lost} of {typical}.",
        step=step,
        confidence=0.9,
        remedy="Call `optimizer.zero_grad()` only after `optimizer.step()`, not for every micro-batch.",
        evidence=(
            Evidence("data/batch/cleared", float(lost), "0", step, "micro-batches whose gradients were cleared"),
            Evidence("data/batch/micro_batches", float(typical), "", step, "micro-batches per step"),
        ),
    )
