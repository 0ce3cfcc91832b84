"""Dropout is so strong that the model cannot learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import Learned, held_out, learned
from sonde.diagnose.measures.model import Module, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.window import Window

STRONG: Final = 0.6


@rule(
    causes=(
        *("underfitting", "lr_too_low", "loss_oscillation", "vanishing_gradients", "label_shuffling", "loss_spikes"),
        *("lr_too_high", "nan_inf", "exploding_gradients"),
    ),
    references=("Srivastava et al. 2014, Dropout", "Schoop et al. 2021, UMLAUT"),
)
def excessive_dropout(window: Window) -> Iterator[Found]:
    """Most units are dropped, and the model learns poorly because of it."""
    strong = [m for m in structure(window).modules if m.kind == "dropout" and _p(m) >= STRONG and m.calls > 0]
    state = learned(window)
    if not strong or state is None or not _is_harmed(window, state):
        return
    worst = max(strong, key=_p)
    yield Found(
        f"Dropout layer {worst.name} drops {percent(_p(worst))} of its units, and {state.outcome}.",
        step=int(state.steps[0]),
        confidence=0.85,
        remedy="Lower the dropout rate: "
        + ", ".join(f"`{m.name}.p = 0.2` (now {number(_p(m), 3)})" for m in strong[:4])
        + ".",
        sites=tuple(m.name for m in strong),
        evidence=(
            Evidence(worst.name, _p(worst), "0.1 to 0.5", meaning="dropout probability"),
            Evidence(state.name, state.end, f"well below {number(state.unit, 3)}", meaning="final loss"),
        ),
    )


def _p(module: Module) -> float:
    p = module.detail.get("p")
    return float(p) if isinstance(p, int | float) else 0.0


def _is_harmed(window: Window, state: Learned) -> bool:
    """Whether the model does not learn, or does far worse with dropout than without."""
    if not np.isfinite(state.left) or state.left > 0.5:
        return True
    held = held_out(window)
    return held is not None and state.left > 0.2 and held.train > 1.5 * held.end
