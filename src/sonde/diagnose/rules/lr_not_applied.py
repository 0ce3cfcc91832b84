"""The optimizer steps with gradients, but nothing changes: its learning rate is zero, or its steps are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import held
from sonde.diagnose.measures.rate import RATE, rate
from sonde.diagnose.measures.readings import reading, typical
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, percent
from sonde.schema.window import Window

MIN_STEPS: Final = 20
MOST: Final = 0.9


@rule(
    severity="warning",
    needs=("update/*/norm", "grad/*/norm", "update/*/nonfinite_fraction", "grad/*/nonfinite_fraction"),
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
    # The norm leaves out NaN: an update of NaN alone looks like none, but has destroyed the weights.
    is_sound = ~(_is_broken(window, "update", updates.steps) | _is_broken(window, "grad", updates.steps))
    still, steps_seen = still[is_sound], updates.steps[is_sound]
    if len(still) < MIN_STEPS or still.mean() < MOST:
        return
    example = typical(window, f"grad/{with_grad[0]}/norm", "", "gradient norm, median")
    since = int(steps_seen[int(np.argmax(still))])
    steps, values = rate(window)
    is_zero = bool(len(values)) and bool((values == 0).mean() >= MOST)
    why = "the learning rate is 0" if is_zero else "the steps are skipped or undone"
    yield Found(
        f"No parameter changed in {percent(still.mean())} of {len(still):,} optimizer steps, although "
        f"{counted(len(with_grad), 'parameter has', 'parameters have')} gradients: {why}.",
        step=since,
        confidence=0.95,
        sites=with_grad[:3],
        evidence=[
            reading(window, f"update/{with_grad[0]}/norm", since, "above 0", "update norm"),
            example,
            *([Evidence(RATE, float(values[-1]), "above 0" if is_zero else "", int(steps[-1]))] if len(values) else []),
        ],
        remedy=(
            "Check the schedule: it multiplies the learning rate by 0 (integer division in a warm-up?)."
            if is_zero
            else "Find what skips the step: a `GradScaler`, or a condition around `optimizer.step()`."
        ),
    )


def _is_broken(window: Window, kind: str, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the steps at which any value of a kind was non-finite."""
    columns = [held(steps, own, values) > 0 for _, own, values in window.by_site(f"{kind}/*/nonfinite_fraction")]
    return np.logical_or.reduce(columns) if columns else np.zeros(len(steps), np.bool_)
