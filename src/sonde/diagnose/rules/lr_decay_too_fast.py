"""The learning rate decays to almost nothing long before training is over, and the loss stops falling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.rate import RATE, rate
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.window import Window

GONE: Final = 0.05
"""Fraction of its peak below which a learning rate counts as gone."""
TOO_SOON: Final = ((0.35, 0.2), (0.5, 0.5))
"""(fraction of the run before which it is gone, final loss as a fraction of its start that is then too high)."""


@rule(
    severity="warning",
    causes=(
        "lr_too_low",
        "underfitting",
        "loss_plateau",
        "constant_output",
        "vanishing_gradients",
        "rnn_vanishing_temporal",
    ),
    references=("PyTorch, torch.optim: a scheduler is stepped once per epoch unless its arguments count batches",),
)
def lr_decay_too_fast(window: Window) -> Iterator[Found]:
    """The learning rate decayed to almost nothing while there was still much to learn."""
    steps, values = rate(window)
    loss = learned(window)
    if loss is None or len(values) < 20 or not nanmax(values) > 0:
        return
    peak = int(np.nanargmax(values))
    low = values < GONE * values[peak]
    after = np.flatnonzero(low & (np.arange(len(values)) > peak))
    if not len(after) or low[after[0] :].mean() < 0.9:
        return
    if not any(after[0] < share * len(values) and loss.left > left for share, left in TOO_SOON):
        return
    gone = int(steps[after[0]])
    yield Found(
        f"The learning rate fell from {number(float(values[peak]), 3)} to less than {percent(GONE)} of that by step "
        f"{gone:,} of {loss.steps[-1]:,}, and {loss.outcome}.",
        step=gone,
        confidence=0.85,
        evidence=[
            Evidence(
                RATE,
                float(values[-1] / values[peak]),
                "above 0.05 for most of the run",
                int(steps[-1]),
                "final learning rate / its peak",
            ),
            loss.left_evidence(),
        ],
        remedy="Call `scheduler.step()` once per epoch, not per batch. Or give the schedule its length in batches: "
        f"`CosineAnnealingLR(optimizer, T_max={int(loss.steps[-1]) + 1})`.",
    )
