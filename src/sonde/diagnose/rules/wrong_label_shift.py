"""A language model's targets are shifted twice, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, seen
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

ALL: Final = 0.95
"""Fraction of targets that equal the token at an offset. Chance is far below, except in texts that repeat."""
FEW: Final = 0.5
BACKWARD_ONLY: Final = 1e-3
"""Mean attention to later positions, below which attention is causal."""


@rule(
    severity="critical",
    causes=("underfitting", "loss_plateau", "attention_mask_leak", "overfitting", "lr_too_low", "data_duplication"),
    references=("Hugging Face transformers: models shift `labels` themselves",),
)
def wrong_label_shift(window: Window) -> Iterator[Found]:
    """The targets are not the next tokens but the same ones, or those two positions ahead."""
    shift, skip, copy = (seen(window, f"data/target/{name}") for name in ("shift", "skip", "copy"))
    if len(shift) < MIN_SEEN or not shift.typical < FEW:
        return
    if skip.typical > ALL:
        yield _found(
            int(skip.steps[0]),
            "The targets are the tokens two positions ahead: labels are shifted twice, once in the data and once in "
            "the model.",
            "Pass `labels=input_ids` unshifted: the model shifts them itself.",
            Evidence("data/target/skip", skip.typical, "below 0.5", None, "fraction equal to the token two ahead"),
        )
    elif copy.typical > ALL and _is_causal(window):
        yield _found(
            int(copy.steps[0]),
            "The targets are the input tokens themselves: the model only learns to copy the token it sees.",
            "Shift the labels by one: compare `logits[:, :-1]` with `labels[:, 1:]`.",
            Evidence("data/target/copy", copy.typical, "below 0.5", None, "fraction equal to the token at its place"),
        )


def _is_causal(window: Window) -> bool:
    """Whether attention sees only earlier positions; encoders may rightly reconstruct their input."""
    futures = [values for _, _, values in window.by_site("attn/*/future")]
    return bool(futures) and all(len(values) and float(values.max()) < BACKWARD_ONLY for values in futures)


def _found(step: int, message: str, remedy: str, evidence: Evidence) -> Found:
    return Found(message, step=step, confidence=0.9, remedy=remedy, evidence=(evidence,))
