"""Losses that compare everything with everything, or add up where a mean was meant."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.rule import Rule
from sonde.diagnose.rules.loss_reduction_sum import loss_reduction_sum
from sonde.diagnose.rules.loss_shape_broadcast import loss_shape_broadcast
from sonde.schema.window import Window
from windows import falling, stack, window

MODEL = {**stack("Linear 8 16", "ReLU", "Linear 16 1"), "loss": "mse_loss"}
SUM = {"data/loss/reduction": 1, "data/loss/numel": 50}


def test_pairs_of_all_with_all_are_named() -> None:
    (finding,) = loss_shape_broadcast(
        window(MODEL, falling(30), {"data/loss/numel": 2500, "data/loss/target_numel": 50})
    )
    assert "2,500 pairs for 50 targets" in finding.message


@pytest.mark.parametrize(("terms", "targets"), [(50, 50), (50, 1)])
def test_equal_shapes_and_a_single_target_are_right(terms: int, targets: int) -> None:
    series = {"data/loss/numel": terms, "data/loss/target_numel": targets}
    assert not list(loss_shape_broadcast(window(MODEL, falling(30), series)))


def test_a_summed_loss_that_does_damage_is_a_warning() -> None:
    bad = np.where(np.arange(40) < 6, 100.0 * np.arange(1, 41), np.nan)
    (finding,) = loss_reduction_sum(window(MODEL, bad, {**SUM, "data/loss/value": bad}))
    assert finding.severity == "warning"
    assert "0.002" in finding.remedy


def test_a_summed_loss_that_learns_is_a_remark() -> None:
    fine = falling(40, 160.0, 1.0)
    (finding,) = loss_reduction_sum(window(MODEL, fine, {**SUM, "data/loss/value": fine}))
    assert finding.severity == "info"


def test_a_sum_that_is_divided_afterwards_is_a_mean() -> None:
    loss = falling(40)
    assert not list(loss_reduction_sum(window(MODEL, loss, {**SUM, "data/loss/value": 50 * loss})))


def test_optimizers_that_do_not_care_are_spared() -> None:
    bad = np.full(40, 100.0)
    adam = {**MODEL, "optimizers": [{"type": "AdamW", "groups": [{"lr": 0.1}]}]}
    (finding,) = loss_reduction_sum(window(adam, bad, {**SUM, "data/loss/value": bad}))
    assert finding.severity == "info"


@pytest.mark.parametrize("rule", [loss_reduction_sum, loss_shape_broadcast])
def test_an_empty_window_says_nothing(rule: Rule) -> None:
    assert not list(rule(Window()))
