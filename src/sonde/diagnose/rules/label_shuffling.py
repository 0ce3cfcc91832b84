"""Labels do not belong to their inputs: the model can memorise them, but nothing generalises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import is_classification, seen
from sonde.diagnose.measures.loss import HeldOut, held_out
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.window import Window

NO_BETTER: Final = 0.97
"""A validation loss that never falls below this fraction of a constant prediction's shows no generalisation."""
LEARNED: Final = 0.96
"""A training loss below this fraction of a constant prediction's shows that something was learned ..."""
APART: Final = 0.04
"""... if the validation loss is worse by at least this much."""
ALIKE: Final = 0.1
"""Outputs that vary less than this over a batch do not depend on the input: that is another fault."""


@rule(
    causes=("overfitting", "underfitting", "lr_too_low", "output_logit_growth", "loss_oscillation"),
    references=("Zhang et al. 2017, Understanding deep learning requires rethinking generalization",),
)
def label_shuffling(window: Window) -> Iterator[Found]:
    """The model memorises its training data, but validation is never better than a constant prediction."""
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
        f"The training loss falls to {percent(train)} of a constant prediction's, but the validation loss never "
        f"falls clearly below that ({number(state.best, 3)} against {number(state.guessing, 3)}): the labels do not "
        "seem to belong to their inputs.",
        step=int(state.steps[0]),
        confidence=0.8 if train < 0.9 else 0.7,
        remedy="Inspect some pairs `(x, y)` as the model receives them. Shuffle both with the same permutation: "
        "`order = torch.randperm(len(x)); x, y = x[order], y[order]`.",
        evidence=(
            Evidence(
                "data/loss/baseline",
                state.guessing,
                f"above {number(state.best, 3)}",
                meaning="loss of a constant prediction",
            ),
            Evidence("val_acc", state.accuracy, "above chance", meaning="validation accuracy"),
        ),
    )


def _is_at_chance(window: Window, state: HeldOut) -> bool:
    """Whether the accuracy is hardly better than chance; true if none was logged."""
    if np.isnan(state.accuracy):
        return True
    num_classes = max(seen(window, "data/target/num_classes").highest, 2)
    chance = seen(window, "data/target/top_share").typical if num_classes == 2 else 1 / num_classes
    return state.accuracy < chance + 0.1 * (1 - chance)
