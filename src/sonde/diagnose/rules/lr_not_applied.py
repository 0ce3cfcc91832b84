"""The optimizer steps with gradients, but nothing changes: its learning rate is zero, or its steps are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.rate import RATE, rate
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, percent
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
    references=("PyTorch, torch.amp: GradScaler skips steps whose gradients are non-finite",),
)
def lr_not_applied(window: Window) -> Iterator[Found]:
    """Parameters have gradients and are in the optimizer, but no step changes them."""
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
    why = "the learning rate is 0" if is_zero else "the steps are skipped or undone"
    yield Found(
        f"No parameter changed in {percent(still.mean())} of {len(updates.steps):,} optimizer steps, although "
        f"{counted(len(with_grad), 'parameter has', 'parameters have')} gradients: {why}.",
        step=int(updates.steps[int(np.argmax(still))]),
        confidence=0.95,
        sites=with_grad[:3],
        evidence=[
            Evidence(f"update/{with_grad[0]}/norm", 0.0, "above 0", meaning="update norm"),
            Evidence(
                f"grad/{with_grad[0]}/norm",
                float(nanmedian(grads.row(with_grad[0]))),
                meaning="gradient norm, median",
            ),
            *([Evidence(RATE, float(values[-1]), "above 0", int(steps[-1]))] if len(values) else []),
        ],
        remedy=(
            "Check the schedule: it multiplies the learning rate by 0 (integer division in a warm-up?)."
            if is_zero
            else "Find what skips the step: a `GradScaler`, or a condition around `optimizer.step()`."
        ),
    )
