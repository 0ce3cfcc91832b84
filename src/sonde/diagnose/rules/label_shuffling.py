"""Labels that do not belong to their inputs: they can be learned by heart, but nothing carries over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import is_classification, seen
from sonde.diagnose.measures.loss import HeldOut, held_out
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

NO_BETTER: Final = 0.97
"""A validation loss that never got below this share of guessing has learned nothing that carries over."""
LEARNED: Final = 0.96
"""A training loss below this share of guessing has learned something, if validation is this much worse:"""
APART: Final = 0.04
ALIKE: Final = 0.1
"""Outputs that vary less than this over a batch are no answer to the input at all: another fault."""


@rule(
    causes=("overfitting", "underfitting", "lr_too_low", "output_logit_growth", "loss_oscillation"),
    references=("Zhang et al. 2017, Understanding deep learning requires rethinking generalization",),
)
def label_shuffling(window: Window) -> Iterator[Found]:
    """Training learns by heart, while validation never gets better than guessing."""
    state = held_out(window)
    if state is None or not is_classification(window) or not state.guessing > 0:
        return
    if not state.best > NO_BETTER * state.guessing or not _is_at_chance(window, state):
        return
    train = state.train / state.guessing
    if not train < LEARNED or not state.end / state.guessing - train > APART:
        return
    if seen(window, "data/output/batch_std").late < ALIKE:
        return
    yield Found(
        f"the training loss falls to {train:.0%} of guessing but validation was never better than guessing "
        f"({state.best:.3g} against {state.guessing:.3g}): labels do not seem to belong to their inputs",
        step=int(state.steps[0]),
        confidence=0.8 if train < 0.9 else 0.7,
        remedy="look at some pairs (x, y) as the model gets them; shuffle both with one permutation: "
        "order = torch.randperm(len(x)); x, y = x[order], y[order]",
        evidence=(
            Evidence("data/loss/baseline", state.guessing, f"above {state.best:.3g}", meaning="loss of guessing"),
            Evidence("val_acc", state.accuracy, "above chance", meaning="accuracy of validation"),
        ),
    )


def _is_at_chance(window: Window, state: HeldOut) -> bool:
    """Hardly better than always naming one class, as far as an accuracy was logged."""
    if np.isnan(state.accuracy):
        return True
    num_classes = max(seen(window, "data/target/num_classes").highest, 2)
    chance = seen(window, "data/target/top_share").typical if num_classes == 2 else 1 / num_classes
    return state.accuracy < chance + 0.1 * (1 - chance)
