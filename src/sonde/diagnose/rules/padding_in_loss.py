"""A language model is trained to predict padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, seen
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent
from sonde.schema.window import Window

MUCH: Final = 0.1
"""Fraction of targets within runs of equal tokens at the end of a text. Masked padding gives 0; texts that really end
in repetitions stay below."""
FEW: Final = 0.5


@rule(
    causes=("class_imbalance", "overfitting", "underfitting"),
    references=("Hugging Face transformers: labels of padding are set to -100",),
)
def padding_in_loss(window: Window) -> Iterator[Found]:
    """Padding counts in the loss, which looks far better than the model is."""
    padding = seen(window, "data/target/padding")
    is_text = max(seen(window, "data/target/shift").typical, seen(window, "data/target/copy").typical) > FEW
    if len(padding) < MIN_SEEN or not is_text or not padding.typical > MUCH:
        return
    yield Found(
        f"{percent(padding.typical)} of the targets are padding: the model is rewarded for repeating the padding "
        "token, and the loss looks lower than it is on text.",
        step=int(padding.steps[0]),
        confidence=0.85,
        remedy="Ignore padding in the loss: `labels = input_ids.masked_fill(attention_mask == 0, -100)`, or pass the "
        "mask to the loss.",
        evidence=(Evidence("data/target/padding", padding.typical, "0", None, "fraction of targets that are padding"),),
    )
