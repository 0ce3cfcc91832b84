"""Targets that are all ignored, shifted wrongly, or padding."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.rules.no_labels import no_labels
from sonde.diagnose.rules.padding_in_loss import padding_in_loss
from sonde.diagnose.rules.wrong_label_shift import wrong_label_shift
from sonde.schema.window import Window
from windows import falling, stack, window

MODEL = stack("Embedding 32 16", "Linear 16 32")
TEXT = {"data/target/shift": 1.0, "data/target/copy": 0.03, "data/target/skip": 0.03, "data/target/padding": 0.0}


def text(**changed: float) -> Window:
    return window(MODEL, falling(60), {**TEXT, **{name.replace("__", "/"): value for name, value in changed.items()}})


def test_targets_that_are_all_ignored() -> None:
    (finding,) = no_labels(text(data__target__counted=0.0))
    assert finding.severity == "critical"
    assert finding.message.startswith("Every target has been ignored by the loss")


def test_batches_without_targets_are_rare_in_healthy_runs() -> None:
    some = np.where(np.arange(60) % 6 == 0, 0.0, 0.3)
    assert not list(no_labels(window(MODEL, falling(60), {"data/target/counted": some})))


def test_labels_shifted_in_the_data_and_in_the_model() -> None:
    (finding,) = wrong_label_shift(text(data__target__shift=0.05, data__target__skip=1.0))
    assert "two positions ahead" in finding.message


def test_a_causal_model_that_copies_its_input() -> None:
    copied = {"data__target__shift": 0.05, "data__target__copy": 1.0}
    (finding,) = wrong_label_shift(text(**copied, attn__0__future=0.0))
    assert "input tokens themselves" in finding.message
    assert not list(wrong_label_shift(text(**copied, attn__0__future=0.4))), "an autoencoder"


def test_next_tokens_are_right() -> None:
    assert not list(wrong_label_shift(text()))
    # A text of one repeated token agrees at every offset.
    assert not list(wrong_label_shift(text(data__target__copy=1.0, data__target__skip=1.0)))


def test_padding_that_counts() -> None:
    (finding,) = padding_in_loss(text(data__target__padding=0.4))
    assert finding.message.startswith("40 % of the targets are padding")
    assert not list(padding_in_loss(text(data__target__padding=0.02)))
    assert not list(padding_in_loss(text(data__target__padding=0.4, data__target__shift=0.1))), "not a text"
