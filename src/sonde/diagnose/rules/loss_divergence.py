"""The loss diverges: it ends far above where it started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

AWAY: Final = 3.0
"""Final loss divided by the first loss."""


@rule(severity="warning", references=("Cohen et al. 2021, training at the edge of stability",))
def loss_divergence(window: Window) -> Iterator[Found]:
    """The loss ends far above where it started."""
    loss = learned(window)
    if loss is None or not loss.first > 0 or not np.isfinite(loss.end):
        return  # a loss that became non-finite is reported by the rule for its cause
    if not loss.end > AWAY * loss.first or len(structure(window).optimizers) > 1:
        return
    since = onset(loss.steps, loss.values > loss.first)
    yield Found(
        f"The loss has diverged: it has been above its starting value since step {since:,}, and ends at "
        f"{number(loss.end / loss.first)} times that.",
        step=since,
        confidence=0.5,
        evidence=[
            Evidence(loss.name, loss.end / loss.first, "below 1", int(loss.steps[-1]), "final loss / first loss")
        ],
        remedy="Lower the learning rate tenfold, and clip gradients before each step: "
        "`clip_grad_norm_(model.parameters(), 1.0)`.",
    )
