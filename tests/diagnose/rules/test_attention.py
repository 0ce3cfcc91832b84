"""Attention that collapses, grows or leaks is named; heads that copy, and encoders that see both ways, are not."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.rules.attention_entropy_collapse import attention_entropy_collapse
from sonde.diagnose.rules.attention_logit_growth import attention_logit_growth
from sonde.diagnose.rules.attention_mask_leak import attention_mask_leak
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

GROWING = np.geomspace(1.0, 800.0, 60)
SHARPENING = np.geomspace(1.0, 0.001, 60)


def seen(loss: Array, entropy: object, logit: object) -> Window:
    return window(stack(lr=0.06), loss, {"attn/blocks.0/entropy_min": entropy, "attn/blocks.0/logit_max": logit})


def test_a_head_that_collapsed_under_huge_logits_is_named() -> None:
    (finding,) = attention_entropy_collapse(seen(stuck(60), SHARPENING, GROWING))
    assert finding.sites == ("blocks.0",)


def test_a_copying_head_of_a_model_that_learns_is_not() -> None:
    assert not list(attention_entropy_collapse(seen(falling(60), SHARPENING, np.linspace(1, 30, 60))))


def test_a_head_that_is_sharp_for_a_moment_is_not() -> None:
    entropy = np.where(np.arange(60) == 20, 0.01, 0.8)
    assert not list(attention_entropy_collapse(seen(stuck(60), entropy, 100.0)))


def test_logits_that_grow_a_hundredfold_are_named_with_a_rate_to_try() -> None:
    (finding,) = attention_logit_growth(seen(stuck(60), 0.5, GROWING))
    assert "`lr=0.006` (now" in finding.remedy
    assert 0 < finding.step < 60


@pytest.mark.parametrize("logit", [np.geomspace(0.1, 30.0, 60), np.full(60, 80.0)])
def test_moderate_or_constant_logits_have_not_grown(logit: Array) -> None:
    assert not list(attention_logit_growth(seen(stuck(60), 0.5, logit)))


def leaking(future: float, shift: float) -> Window:
    return window(stack(), falling(40), {"attn/blocks.0/future": future, "data/target/shift": shift})


def test_a_language_model_that_sees_the_next_token_is_named() -> None:
    (finding,) = attention_mask_leak(leaking(0.48, 1.0))
    assert finding.severity == "critical"
    assert "is_causal=True" in finding.remedy


@pytest.mark.parametrize(("future", "shift"), [(0.0, 1.0), (0.48, 0.04)])
def test_a_mask_or_targets_that_are_not_the_next_tokens_are_fine(future: float, shift: float) -> None:
    assert not list(attention_mask_leak(leaking(future, shift)))


@pytest.mark.parametrize(("keys", "is_named"), [(17.0, False), (8.0, True)])
def test_an_encoder_of_another_length_next_to_masked_layers_reads_no_targets(keys: float, is_named: bool) -> None:
    series: dict[str, object] = {"data/target/shift": 1.0}
    series |= {"attn/text.0/future": 0.0, "attn/text.0/keys": 8.0}
    series |= {"attn/other.0/future": 0.47, "attn/other.0/keys": keys}
    found = list(attention_mask_leak(window(stack(), falling(40), series)))
    assert [finding.sites for finding in found] == ([("other.0",)] if is_named else [])


def test_empty_windows_say_nothing() -> None:
    for rule in (attention_entropy_collapse, attention_logit_growth, attention_mask_leak):
        assert not list(rule(Window()))
