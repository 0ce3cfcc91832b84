"""The model memorises the training data: validation gets worse while training still improves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import HeldOut, held_out, validation_name
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

GAP: Final = 3.0
TURN: Final = 1.15
MATTERS: Final = 0.5
"""A validation loss well below that of a constant prediction is good, whatever the training loss ..."""
BY_HEART: Final = 100.0
"""... unless the training loss is negligible in comparison, and the validation loss is not that good."""
RISEN: Final = 1.3
"""Final validation loss divided by its best, from which a loss that rises without a pause counts as if it were twice as
high, if the training loss is STEADY_GAP times smaller."""
STEADY_GAP: Final = 8.0
STEADY: Final = 0.8
"""Fraction of the validation points after the best one that are above the one before."""
MIN_RISING: Final = 5
"""Number of such points. Validation losses of healthy runs do not rise by 10 % at all, or not for so long."""
LEARNED: Final = 0.5
ACCURATE: Final = 0.85
"""Accuracy above which a rising loss only means that the model is overconfident in its errors: info."""
MIN_LATER: Final = 2
"""Minimum number of validation points after the best one."""


@rule(references=("Prechelt 1998, Early stopping: but when?", "SageMaker Debugger: Overfit"))
def overfitting(window: Window) -> Iterator[Found]:
    """The validation loss rises while the training loss continues to fall."""
    state = held_out(window)
    if state is None or not state.gap > GAP or not state.turn > TURN:
        return
    unit = state.guessing if np.isfinite(state.guessing) else float(state.values[0])
    enough = MATTERS if state.gap < BY_HEART and not _rises_steadily(state) else MATTERS / 2
    if not state.end > enough * unit or not state.train < LEARNED * unit:
        return
    if (state.steps > state.best_step).sum() < MIN_LATER:
        return
    name = validation_name(window) or ""
    has_dropout = any(module.kind == "dropout" for module in structure(window).modules)
    yield Found(
        f"The validation loss was lowest at step {state.best_step:,} ({number(state.best, 3)}) and has since risen to "
        f"{number(state.end, 3)}, while the training loss fell to {number(state.train, 3)}.",
        step=state.best_step,
        confidence=0.8,
        remedy=f"Stop around step {state.best_step:,}, or add data, "
        f"{'augmentation or weight decay' if has_dropout else 'augmentation, weight decay or `nn.Dropout(0.2)`'}.",
        severity="info" if state.accuracy > ACCURATE else None,
        evidence=(
            Evidence(name, state.gap, "below 3", meaning="validation loss / training loss"),
            Evidence(name, state.turn, "below 1.15", state.best_step, "final validation loss / its best"),
        ),
    )


def _rises_steadily(state: HeldOut) -> bool:
    later = np.diff(state.values[state.steps >= state.best_step])
    is_steady = len(later) >= MIN_RISING and float((later > 0).mean()) >= STEADY
    return is_steady and state.turn > RISEN and state.gap > STEADY_GAP
