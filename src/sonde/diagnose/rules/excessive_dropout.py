"""Dropout so strong that too little is left to learn with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import Learned, held_out, learned
from sonde.diagnose.measures.model import Module, structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

STRONG: Final = 0.6


@rule(
    causes=("underfitting", "lr_too_low", "loss_oscillation", "vanishing_gradients", "label_shuffling", "loss_spikes"),
    references=("Srivastava et al. 2014, Dropout", "Schoop et al. 2021, UMLAUT"),
)
def excessive_dropout(window: Window) -> Iterator[Found]:
    """Most units are dropped, and training suffers from it."""
    strong = [m for m in structure(window).modules if m.kind == "dropout" and _p(m) >= STRONG and m.calls > 0]
    state = learned(window)
    if not strong or state is None or not _is_harmed(window, state):
        return
    worst = max(strong, key=_p)
    yield Found(
        f"the dropout {worst.name} drops {_p(worst):.0%} of its units, and {state.left:.0%} of the loss is left",
        step=int(state.steps[0]),
        confidence=0.85,
        remedy="\n".join(f"{m.name}.p = 0.2  # now {_p(m):g}" for m in strong[:4]),
        sites=tuple(m.name for m in strong),
        evidence=(
            Evidence(worst.name, _p(worst), "0.1 to 0.5", meaning="p of the dropout"),
            Evidence(state.name, state.end, f"well below {state.unit:.3g}"),
        ),
    )


def _p(module: Module) -> float:
    p = module.detail.get("p")
    return float(p) if isinstance(p, int | float) else 0.0


def _is_harmed(window: Window, state: Learned) -> bool:
    """It does not learn, or it does far worse with dropout than without."""
    if not np.isfinite(state.left) or state.left > 0.5:
        return True
    held = held_out(window)
    return held is not None and state.left > 0.2 and held.train > 1.5 * held.end
