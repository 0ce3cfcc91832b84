"""All targets of a batch are ignored: the loss has nothing to learn from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.data import seen
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent, since
from sonde.schema.window import Window

MOST: Final = 0.5
"""Fraction of batches without any target. Single ones happen where long prompts are cut off."""
MIN_SEEN: Final = 3


@rule(
    severity="critical",
    causes=(
        "nan_inf", "underfitting", "lr_not_applied", "lr_too_low", "constant_output", "frozen_layers", "loss_plateau",
        "vanishing_gradients", "class_imbalance", "label_shuffling", "low_precision_underflow", "overfitting",
    ),
    references=("PyTorch documentation: CrossEntropyLoss, ignore_index", "TRL documentation: completion_only_loss"),
)  # fmt: skip
def no_labels(window: Window) -> Iterator[Found]:
    """Every target is ignored or masked, so the loss is 0 or NaN and nothing is learned."""
    counted = seen(window, "data/target/counted")
    if len(counted) < MIN_SEEN:
        return
    is_empty = counted.values == 0
    share = float(is_empty.mean())
    if share < MOST:
        return
    step = onset(counted.steps, is_empty)
    which = "Every target" if share == 1 else f"Every target of {percent(share)} of the batches"
    yield Found(
        f"{which} has been ignored by the loss {since(step)}: the model gets no labels.",
        step=step,
        confidence=0.95,
        remedy="Print `(labels != -100).sum()` for one batch. Labels are masked as prompt or padding, or the texts are "
        "cut before their answers begin: raise `max_length`, and check the chat template that marks the answer.",
        evidence=(Evidence("data/target/counted", 0.0, "above 0", step, "fraction of targets that count"),),
    )
