"""The loss runs away from where it began."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

AWAY: Final = 3.0
"""Times the loss of the start."""


@rule(severity="warning", references=("Cohen et al. 2021, training at the edge of stability",))
def loss_divergence(window: Window) -> Iterator[Found]:
    """The loss ends far above where it began."""
    loss = learned(window)
    if loss is None or not loss.first > 0 or not np.isfinite(loss.end):
        return  # a loss that stopped being finite is named by what made it so
    if not loss.end > AWAY * loss.first or len(structure(window).optimizers) > 1:
        return
    since = onset(loss.steps, loss.values > loss.first)
    yield Found(
        f"the loss has run away: since step {since} it is above its start, now {loss.end / loss.first:.1f} times that",
        step=since,
        confidence=0.5,
        evidence=[Evidence(loss.name, loss.end / loss.first, "below 1", int(loss.steps[-1]), "end over start")],
        remedy="lower the learning rate ten times, and clip_grad_norm_(model.parameters(), 1.0) before each step.",
    )
