"""Gradients arrive, the optimizer steps, and nothing moves: its learning rate is zero, or its steps are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.rate import RATE, rate
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MIN_STEPS: Final = 20
MOST: Final = 0.9


@rule(
    severity="warning",
    needs=("update/*/norm", "grad/*/norm"),
    causes=(
        "lr_too_low",
        "underfitting",
        "loss_plateau",
        "constant_output",
        "frozen_layers",
        "optimizer_missing_params",
    ),
    references=("PyTorch, torch.amp: GradScaler skips steps whose gradients are not finite",),
)
def lr_not_applied(window: Window) -> Iterator[Found]:
    """Parameters have gradients and are in the optimizer, yet no step moves them."""
    updates, grads = window.grid("update/*/norm"), window.grid("grad/*/norm")
    if len(updates.steps) < MIN_STEPS or not len(grads):
        return
    with_grad = [s for s in updates.sites if s in grads.sites and np.nanmax(grads.row(s), initial=0.0) > 0]
    if not with_grad:
        return
    still = ~(np.fmax.reduce([updates.row(site) for site in with_grad], axis=0) > 0)
    if still.mean() < MOST:
        return
    steps, values = rate(window)
    is_zero = bool(len(values)) and bool((values == 0).mean() >= MOST)
    why = "the learning rate is 0" if is_zero else "its steps are skipped, or undone"
    yield Found(
        f"no parameter moved in {still.mean():.0%} of {len(updates.steps)} optimizer steps, though {len(with_grad)} "
        f"have gradients: {why}",
        step=int(updates.steps[int(np.argmax(still))]),
        confidence=0.95,
        sites=with_grad[:3],
        evidence=[
            Evidence(f"update/{with_grad[0]}/norm", 0.0, "above 0"),
            Evidence(f"grad/{with_grad[0]}/norm", float(nanmedian(grads.row(with_grad[0])))),
            *([Evidence(RATE, float(values[-1]), "above 0", int(steps[-1]))] if len(values) else []),
        ],
        remedy=(
            "look at the schedule: a factor of 0 (integer division in a warm-up?) times any learning rate is 0."
            if is_zero
            else "look for what skips the step (GradScaler, a condition round optimizer.step())."
        ),
    )
