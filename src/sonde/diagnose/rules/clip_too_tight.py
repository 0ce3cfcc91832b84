"""Gradient clipping cuts nearly everything off every step, and learning crawls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.motion import NEEDS as MOTION
from sonde.diagnose.measures.motion import motion
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Column, Window

CUT: Final = 0.05
"""What clipping leaves of a typical gradient; clipping norms of 1 to 5 at 1.0 leaves 0.2 or more."""
ALWAYS: Final = 0.95
SLOW: Final = 3e-4
"""Share of its size that a weight matrix moves in a step: above it clipping does no harm (Adam undoes it)."""
UNLEARNED: Final = 0.6


@rule(
    severity="warning",
    needs=(*MOTION, "grad/*/clip_factor"),
    causes=("lr_too_low", "underfitting", "loss_plateau", "constant_output", "adam_epsilon_dominates"),
    references=("Pascanu et al. 2013, On the difficulty of training recurrent neural networks", "DEForm, operator RGC"),
)
def clip_too_tight(window: Window) -> Iterator[Found]:
    """The gradient is clipped to a small part of itself at every step, and the model hardly learns."""
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
    suggestion = f"{nanmedian(norm):.1g}" if len(norm) else "1.0"
    now = f"  # now {limit[-1]:g}" if len(limit) else ""
    yield Found(
        f"clipping leaves {typical:.1%} of the gradient at {(factors < 0.5).mean():.0%} of the steps since "
        f"step {steps[0]}, and {loss.left:.0%} of the loss is left",
        step=int(steps[0]),
        confidence=0.85,
        evidence=[
            Evidence("grad/*/clip_factor", typical, "0.2 to 1", None, "median of what clipping multiplies by"),
            Evidence("update/*/ratio", moved.typical, "7e-4 to 2e-2", None, "typical update over weight"),
            Evidence(loss.name, loss.left, "falling", int(loss.steps[-1]), "share of the loss that is left"),
        ],
        remedy=f"clip_grad_norm_(model.parameters(), max_norm={suggestion}){now}",
    )


def _factors(window: Window) -> Column:
    """What clipping multiplied the gradient by, step by step."""
    steps, norm = window.get("optim/grad_norm")
    limits = window.get("optim/max_norm")[1]
    if len(norm) and len(limits) == len(norm):
        return steps, np.minimum(1.0, limits / np.maximum(norm, 1e-30))
    grid = window.grid("grad/*/clip_factor")
    if not grid.values.size:
        return np.empty(0, np.int64), np.empty(0)
    return grid.steps, np.array([float(nanmedian(c)) if np.isfinite(c).any() else 1.0 for c in grid.values.T])
