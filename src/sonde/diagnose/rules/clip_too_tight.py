"""Gradient clipping removes nearly all of the gradient at every step, and the model hardly learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.motion import NEEDS as MOTION
from sonde.diagnose.measures.motion import motion
from sonde.diagnose.measures.rate import one_digit
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent, since
from sonde.schema.window import Column, Window

CUT: Final = 0.05
"""Fraction of a typical gradient that clipping leaves; clipping norms of 1 to 5 at 1.0 leaves 0.2 or more."""
ALWAYS: Final = 0.95
SLOW: Final = 3e-4
"""Update relative to the weight matrix; above it, clipping does no harm (Adam undoes it)."""
UNLEARNED: Final = 0.6


@rule(
    severity="warning",
    needs=(*MOTION, "grad/*/clip_factor"),
    causes=(
        "lr_too_low",
        "underfitting",
        "loss_plateau",
        "constant_output",
        "adam_epsilon_dominates",
        "rnn_vanishing_temporal",
    ),
    references=("Pascanu et al. 2013, On the difficulty of training recurrent neural networks", "DEForm, operator RGC"),
)
def clip_too_tight(window: Window) -> Iterator[Found]:
    """The gradient is clipped to a small fraction of its norm at every step, and the model hardly learns."""
    loss, moved = learned(window), motion(window)
    steps, factors = _factors(window)
    if loss is None or moved is None or len(factors) < 20:
        return
    typical = float(nanmedian(factors))
    if not typical < CUT or (factors < 0.5).mean() < ALWAYS:
        return
    if not loss.left > UNLEARNED or not loss.end > UNLEARNED * np.fmax(loss.guessing, 0.0) or moved.typical > SLOW:
        return
    norm, limit = window.get("optim/grad_norm")[1], window.get("optim/max_norm")[1]
    suggestion = one_digit(float(nanmedian(norm))) if len(norm) else "1.0"
    now = f" (now {number(float(limit[-1]), 3)})" if len(limit) else ""
    yield Found(
        f"Clipping has cut {percent((factors < 0.5).mean())} of the gradients by more than half "
        f"{since(int(steps[0]))}, a typical one to {percent(typical)} of its norm, and {loss.outcome}.",
        step=int(steps[0]),
        confidence=0.85,
        evidence=[
            Evidence("grad/*/clip_factor", typical, "0.2 to 1", None, "median clipping factor"),
            Evidence("update/*/ratio", moved.typical, "7e-4 to 2e-2", None, "update norm / weight norm, median"),
            loss.left_evidence(),
        ],
        remedy=f"Raise the clipping threshold{now}: `clip_grad_norm_(model.parameters(), max_norm={suggestion})`.",
    )


def _factors(window: Window) -> Column:
    """The factor by which clipping scaled the gradient at every step."""
    steps, norm = window.get("optim/grad_norm")
    limits = window.get("optim/max_norm")[1]
    if len(norm) and len(limits) == len(norm):
        return steps, np.minimum(1.0, limits / np.maximum(norm, 1e-30))
    grid = window.grid("grad/*/clip_factor")
    if not grid.values.size:
        return np.empty(0, np.int64), np.empty(0)
    return grid.steps, np.array([float(nanmedian(c)) if np.isfinite(c).any() else 1.0 for c in grid.values.T])
