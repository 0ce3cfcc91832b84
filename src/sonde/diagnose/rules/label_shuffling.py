"""Labels do not belong to their inputs: the model can memorise them, but nothing generalises, or nothing is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_classification, is_language_model, seen
from sonde.diagnose.measures.loss import HeldOut, held_out, learned
from sonde.diagnose.measures.motion import motion
from sonde.diagnose.measures.outlook import is_improving
from sonde.diagnose.measures.readings import nearest
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.window import Window

NO_BETTER: Final = 0.97
"""A validation loss that never falls below this fraction of a constant prediction's shows no generalisation."""
LEARNED: Final = 0.96
"""A training loss below this fraction of a constant prediction's shows that something was learned ..."""
APART: Final = 0.04
"""... if the validation loss is worse by at least this much."""
MIN_STEPS: Final = 100
MOVED: Final = 0.1
"""Total length of all steps relative to the weights, from which a model had its chance to learn."""
NOISE: Final = 0.12
"""Median cosine of successive gradients: 0 if batches have nothing in common that could be learned."""
VARIED: Final = 0.3
"""Variation of the outputs over a batch; the model does tell its inputs apart."""
NEAR: Final = (0.9, 1.05)
"""Range of the final training loss relative to a constant prediction's."""
ALIKE: Final = 0.1
"""Outputs that vary less than this over a batch do not depend on the input: that is another fault."""


@rule(
    like="underfitting",
    causes=("overfitting", "underfitting", "loss_plateau", "lr_too_low", "output_logit_growth", "loss_oscillation"),
    references=("Zhang et al. 2017, Understanding deep learning requires rethinking generalization",),
)
def label_shuffling(window: Window) -> Iterator[Found]:
    """Labels do not fit their inputs: what is learned does not carry over to validation, or nothing is learned."""
    if not is_classification(window):
        return
    if (unrelated := _unrelated(window)) is not None:
        yield unrelated
        return
    state = held_out(window)
    if state is None or not state.guessing > 0:
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


def _unrelated(window: Window) -> Found | None:
    """Nothing that the model could learn has shown up, although it moves, tells its inputs apart and gets gradients."""
    loss, moved = learned(window), motion(window)
    if loss is None or moved is None or len(loss.values) < MIN_STEPS or not loss.guessing > 0:
        return None
    if is_language_model(window) or is_improving(loss):
        return None
    left, cosines = loss.end / loss.guessing, seen(window, "model/model/grad_cosine")
    if not NEAR[0] < left < NEAR[1] or not loss.best > NEAR[0] * loss.guessing or len(cosines) < MIN_SEEN:
        return None
    if not np.nansum(moved.of_step) > MOVED or not abs(cosines.typical) < NOISE:
        return None
    right, largest = seen(window, "data/output/accuracy"), seen(window, "data/target/top_share").mean
    if not seen(window, "data/output/batch_std").late > VARIED or not right.mean < largest + 0.1 * (1 - largest):
        return None
    return Found(
        f"Nothing in the inputs helps to predict the targets: after {len(loss.values):,} steps the training loss is "
        f"{percent(left)} of a constant prediction's, and the gradients of successive batches have nothing in common. "
        "The labels may not belong to their inputs.",
        step=int(loss.steps[0]),
        confidence=0.55,
        remedy="Inspect some pairs `(x, y)` as the model receives them. Shuffle both with the same permutation: "
        "`order = torch.randperm(len(x)); x, y = x[order], y[order]`. If they match, the task is too hard for this "
        "model: train longer, or make it larger.",
        evidence=(
            Evidence(loss.name, loss.end, "", meaning="final loss"),
            Evidence("data/loss/baseline", loss.guessing, "", meaning="loss of a constant prediction"),
            nearest(window, "model/model/grad_cosine", cosines.typical, "", "cosine of successive gradients, typical"),
        ),
    )


def _is_at_chance(window: Window, state: HeldOut) -> bool:
    """Whether the accuracy is hardly better than chance; true if none was logged."""
    if np.isnan(state.accuracy):
        return True
    num_classes = max(seen(window, "data/target/num_classes").highest, 2)
    chance = seen(window, "data/target/top_share").typical if num_classes == 2 else 1 / num_classes
    return state.accuracy < chance + 0.1 * (1 - chance)
