"""The loss diverges: it ends far above where it started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.readings import reading
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

AWAY: Final = 3.0
"""Final loss divided by the first loss."""
AWAY_FROM_BEST: Final = 5.0
"""Final loss divided by its lowest level, if it also ends above WORSE times the first loss. A healthy run does not end
above its first loss; noise lifts it by less than half."""
WORSE: Final = 1.5
LOW: Final = 0.2
"""Quantile of the last tenth of the losses that must have left the starting value, or the lowest level: losses that
swing, as those of reinforcement learning do, come back to it again and again."""
LEFT: Final = 1.2
"""Loss relative to its lowest level above which it has begun to rise."""


@rule(severity="warning", references=("Cohen et al. 2021, training at the edge of stability",))
def loss_divergence(window: Window) -> Iterator[Found]:
    """The loss ends far above where it started."""
    loss = learned(window)
    if loss is None or not loss.first > 0 or not np.isfinite(loss.end):
        return  # a loss that became non-finite is reported by the rule for its cause
    tail = loss.values[-max(5, len(loss.values) // 10) :]
    low = float(np.quantile(tail[np.isfinite(tail)], LOW))
    rose = loss.end > AWAY_FROM_BEST * loss.best and loss.end > WORSE * loss.first and low > LEFT * loss.best
    if not ((loss.end > AWAY * loss.first and low > loss.first) or rose) or len(structure(window).optimizers) > 1:
        return
    lowest_at = int(loss.steps[int(np.nanargmin(np.where(np.isfinite(loss.values), loss.values, np.nan)))])
    later = loss.steps >= (lowest_at if rose else loss.steps[0])
    since = onset(loss.steps[later], loss.values[later] > (LEFT * loss.best if rose else loss.first))
    fell = f"after it had fallen from {number(loss.first)} to {number(loss.best)}, it rose again"
    yield Found(
        f"The loss has diverged: {fell if loss.best < 0.5 * loss.first else 'it has been above its starting value'} "
        f"since step {since:,}, and ends at {number(loss.end / loss.first)} times its starting value.",
        step=since,
        confidence=0.5,
        evidence=[loss.left_evidence(1.0), reading(window, loss.name, lowest_at, "", "lowest loss")],
        remedy="Lower the learning rate tenfold, and clip gradients before each step: "
        "`clip_grad_norm_(model.parameters(), 1.0)`.",
    )
