"""Outputs that do not fit their loss are named by what they look like; harmless pairs and slow learners are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from sonde.diagnose.finding import Finding
from sonde.diagnose.rules.wrong_loss_activation_pair import wrong_loss_activation_pair
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

PLAIN = ("Linear 8 16", "ReLU", "Linear 16 5")
CLASSES = {"data/target/is_class": 1, "data/target/min": 0, "data/target/max": 4, "data/target/num_classes": 5}
LOGITS = {"data/output/min": -4.0, "data/output/max": 5.0, "data/output/width": 5, "data/output/is_distribution": 0}
PROBABILITIES = {"data/output/min": 0.01, "data/output/max": 0.9, "data/output/width": 5}
NUMBERS = {"data/target/is_class": 0, "data/target/std": 1.0, "data/target/mean": 0.0, "data/target/num_classes": 40}


def judge(
    loss: str, series: Mapping[str, object], layers: tuple[str, ...] = PLAIN, values: Any = None
) -> list[Finding]:
    document = {**stack(*layers), "loss": loss}
    return list(wrong_loss_activation_pair(window(document, falling(40) if values is None else values, series)))


def test_probabilities_into_cross_entropy_are_softmax_twice() -> None:
    (finding,) = judge("cross_entropy", {**CLASSES, **PROBABILITIES, "data/output/is_distribution": 1})
    assert "twice" in finding.message
    assert finding.severity == "critical"


def test_logarithms_of_probabilities_into_cross_entropy_are_harmless() -> None:
    series = {**CLASSES, **LOGITS, "data/output/max": 0.0, "data/output/is_log_distribution": 1}
    assert not judge("cross_entropy", series)


def test_logits_into_cross_entropy_are_right() -> None:
    assert not judge("cross_entropy", {**CLASSES, **LOGITS})


def test_a_softmax_over_one_unit_is_constant() -> None:
    series = {"data/output/min": 1, "data/output/max": 1, "data/output/width": 1, "data/output/is_distribution": 1}
    (finding,) = judge("mse_loss", series)
    assert "single unit" in finding.message


def test_cross_entropy_over_one_output_is_zero() -> None:
    assert judge("cross_entropy", {**LOGITS, "data/output/width": 1})


def test_columns_that_sum_to_one_are_a_softmax_over_the_batch() -> None:
    series = {**PROBABILITIES, "data/output/is_distribution": 0, "data/output/column_distribution": 1}
    (finding,) = judge("nll_loss", {**series, "data/input/size": 32})
    assert "batch" in finding.message
    assert not judge("mse_loss", {**series, "data/input/size": 1})


def test_a_sigmoid_before_a_loss_that_has_its_own() -> None:
    outputs = {"data/output/min": 0.001, "data/output/max": 0.99, "data/output/width": 1}
    assert judge("binary_cross_entropy_with_logits", outputs)
    assert not judge("binary_cross_entropy", outputs)


def test_a_sigmoid_called_as_a_function_is_known_by_what_it_does_to_the_largest_output() -> None:
    low = np.linspace(-1.0, -2.0, 40)
    squashed = {"data/output/min": 1 / (1 + np.exp(-low)), "data/output/max": 0.6, "data/output/width": 5}
    after = {**squashed, "act/2/max_abs": np.abs(low)}
    assert judge("binary_cross_entropy_with_logits", {**after, "data/output/width": 1})
    assert judge("mse_loss", {**NUMBERS, **after, "data/target/min": -3.0, "data/target/max": 3.0})
    assert not judge("binary_cross_entropy", {**after, "data/output/width": 1})
    assert not judge("binary_cross_entropy_with_logits", {**after, "act/2/max_abs": 0.6, "data/output/width": 1})


def test_targets_below_outputs_that_never_cross_zero_are_out_of_reach() -> None:
    shy = {"data/output/min": 0.01, "data/output/max": 0.8, "data/output/width": 1}
    targets = {**NUMBERS, "data/target/min": -3.0, "data/target/max": 3.0}
    assert judge("mse_loss", {**targets, **shy})
    assert not judge("mse_loss", {**targets, **shy, "data/output/max": 0.05}), "all outputs are near the mean"
    assert not judge("mse_loss", {**targets, **shy, "data/target/min": 0.0}), "no target is below 0"


def test_small_positive_logits_are_no_sigmoid() -> None:
    outputs = {"data/output/min": 0.05, "data/output/max": 0.06, "data/output/width": 1}
    assert not judge("binary_cross_entropy_with_logits", outputs)


def test_nll_of_logits_is_negative() -> None:
    series = {**LOGITS, "data/output/is_log_distribution": 0, "data/loss/value": -3.0}
    assert judge("nll_loss", series)
    assert not judge("nll_loss", {**series, "data/output/is_log_distribution": 1})


@pytest.mark.parametrize(("low", "last"), [(0.0, "ReLU"), (-0.99, "Tanh"), (0.01, "Sigmoid")])
def test_logits_cannot_be_bounded(low: float, last: str) -> None:
    series = {**CLASSES, **LOGITS, "data/output/min": low, "data/output/max": 0.97}
    assert judge("cross_entropy", series, (*PLAIN, last))


@pytest.mark.parametrize(("last", "low", "high"), [("ReLU", 0.0, 3.0), ("Tanh", -1.0, 1.0), ("Sigmoid", 0.0, 1.0)])
def test_targets_beyond_the_last_activation(last: str, low: float, high: float) -> None:
    outputs = {"data/output/min": low, "data/output/max": high, "data/output/width": 1}
    far = {**NUMBERS, "data/target/min": -3.0, "data/target/max": 3.0}
    near = {**NUMBERS, "data/target/min": max(low, -1.2), "data/target/max": min(high, 1.2)}
    assert judge("mse_loss", {**outputs, **far}, (*PLAIN, last))
    assert not judge("mse_loss", {**outputs, **near}, (*PLAIN, last))


def test_outputs_that_press_against_a_bound_are_bounded_though_no_module_says_so() -> None:
    outputs = {"data/output/min": 0.4, "data/output/max": 0.999, "data/output/width": 1}
    targets = {**NUMBERS, "data/target/min": 0.0, "data/target/max": 5.0}
    assert judge("smooth_l1_loss", {**outputs, **targets})
    assert not judge("smooth_l1_loss", {**outputs, **targets, "data/output/max": 0.6})


def test_binary_cross_entropy_wants_targets_between_zero_and_one() -> None:
    outputs = {"data/output/min": -3.0, "data/output/max": 3.0, "data/output/width": 1}
    assert judge("binary_cross_entropy_with_logits", {**outputs, "data/target/min": -1, "data/target/max": 1})
    assert not judge("binary_cross_entropy_with_logits", {**outputs, "data/target/min": 0, "data/target/max": 1})


def test_numbers_of_classes_are_not_distances() -> None:
    outputs = {"data/output/min": -0.3, "data/output/max": 4.2, "data/output/width": 1}
    numbers = {**CLASSES, "data/target/is_class": 0, "data/target/std": 1.4, "data/target/top_share": 0.25}
    assert judge("mse_loss", {**outputs, **numbers})
    assert not judge("mse_loss", {**outputs, **numbers, "data/target/num_classes": 32})
    assert not judge("mse_loss", {**outputs, **numbers, "data/target/top_share": 0.7})


def test_squared_error_on_one_hot_is_blamed_only_when_it_does_not_learn() -> None:
    one_hot = {**LOGITS, "data/target/is_class": 1, "data/target/min": 0, "data/target/max": 1, "data/target/std": 0.4}
    assert judge("mse_loss", one_hot, values=np.where(np.arange(40) < 5, 1e3, np.nan))
    assert judge("mse_loss", one_hot, values=stuck(40))
    assert not judge("mse_loss", one_hot)


def test_softmax_where_several_labels_may_be_true() -> None:
    outputs = {**PROBABILITIES, "data/output/is_distribution": 1, "data/target/is_class": 1}
    assert judge("binary_cross_entropy", {**outputs, "data/target/mean": 0.5})
    assert not judge("binary_cross_entropy", {**outputs, "data/target/mean": 0.2})


def test_an_empty_window_says_nothing() -> None:
    assert not list(wrong_loss_activation_pair(Window()))
