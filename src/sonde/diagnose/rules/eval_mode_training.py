"""The model is trained in eval mode: dropout does nothing, and batch norm does not update its running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.model import Module, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import since
from sonde.schema.window import Window

MIN_INSPECTIONS: Final = 5


@rule(
    severity="critical",
    causes=("overfitting", "init_scale", "exploding_gradients", "loss_spikes", "underfitting", "nan_inf"),
    references=("PyTorch documentation: Module.eval", "Jiang et al. 2025, TrainCheck"),
)
def eval_mode_training(window: Window) -> Iterator[Found]:
    """The model is trained in eval mode."""
    meant = [m for m in structure(window).modules if m.kind == "norm" and m.type.startswith(("BatchNorm", "SyncBatch"))]
    drops = [m for m in structure(window).modules if m.kind == "dropout"]
    for site, steps, share in window.by_site("model/*/eval_share"):
        is_eval = share > 0.99
        # The first steps may come before a loop that calls train(); what matters is what happened after.
        if len(share) < MIN_INSPECTIONS or is_eval.mean() < 0.4 or not is_eval[-3:].all():
            continue
        if not drops and meant and all(_is_frozen(window, m) for m in meant):
            continue
        step = onset(steps, is_eval)
        yield Found(
            f"The model has been in eval mode {since(step)}: {_effect(meant, drops)}.",
            step=step,
            confidence=0.95,
            remedy="Call `model.train()` at the start of every epoch and after each validation.",
            sites=tuple(m.name for m in (*meant, *drops)),
            evidence=(
                Evidence(
                    f"model/{site}/eval_share", float(np.median(share)), "0", step, "fraction of modules in eval mode"
                ),
            ),
        )


def _is_frozen(window: Window, norm: Module) -> bool:
    """Whether the weights of a batch norm are frozen too; then eval mode is intended."""
    own = [p for p in structure(window).parameters if p.owner == norm.name]
    return bool(own) and not any(p.trainable for p in own)


def _effect(norms: list[Module], drops: list[Module]) -> str:
    parts = []
    if drops:
        parts.append("dropout is off")
    if norms:
        parts.append("batch norm uses frozen running statistics and does not update them")
    return " and ".join(parts) or "layers behave as in validation"
