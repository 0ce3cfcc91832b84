"""The model learns the training data by heart: validation gets worse while training goes on getting better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import held_out, validation_name
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

GAP: Final = 3.0
TURN: Final = 1.15
MATTERS: Final = 0.5
"""A validation loss well below guessing is good, whatever training does ..."""
BY_HEART: Final = 100.0
"""... unless the training loss is next to nothing beside it, and it is not that good."""
LEARNED: Final = 0.5
ACCURATE: Final = 0.85
"""Where this many answers are right, a rising loss means that the model is too sure of the wrong ones: a remark."""
MIN_LATER: Final = 2
"""Points of validation after the best one."""


@rule(references=("Prechelt 1998, Early stopping: but when?", "SageMaker Debugger: Overfit"))
def overfitting(window: Window) -> Iterator[Found]:
    """The validation loss rises from its best while the training loss goes on falling."""
    state = held_out(window)
    if state is None or not state.gap > GAP or not state.turn > TURN:
        return
    unit = state.guessing if np.isfinite(state.guessing) else float(state.values[0])
    enough = MATTERS if state.gap < BY_HEART else MATTERS / 2
    if not state.end > enough * unit or not state.train < LEARNED * unit:
        return
    if (state.steps > state.best_step).sum() < MIN_LATER:
        return
    name = validation_name(window) or ""
    yield Found(
        f"validation is best at step {state.best_step} ({state.best:.3g}) and has risen to {state.end:.3g} since, "
        f"while the training loss fell to {state.train:.3g}",
        step=state.best_step,
        confidence=0.8,
        remedy=f"stop at step {state.best_step}, or more data, augmentation, weight decay"
        + ("" if any(module.kind == "dropout" for module in structure(window).modules) else ", nn.Dropout(0.2)"),
        severity="info" if state.accuracy > ACCURATE else None,
        evidence=(
            Evidence(name, state.gap, "below 3 times the training loss", meaning="validation over training loss"),
            Evidence(name, state.turn, "below 1.15 times its best", state.best_step, "rise from the best"),
        ),
    )
