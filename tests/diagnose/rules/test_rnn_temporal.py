"""Recurrent layers that forget or explode are reported if that is a fault; short tasks and learned memory are not."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.rule import Rule
from sonde.diagnose.rules.rnn_exploding_temporal import rnn_exploding_temporal
from sonde.diagnose.rules.rnn_vanishing_temporal import rnn_vanishing_temporal
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window


def seen(loss: Array, reach: object, length: int = 40) -> Window:
    return window(stack("LSTM"), loss, {"rnn/0/reach": reach, "rnn/0/length": length})


def test_a_layer_that_forgets_and_does_not_learn_is_named() -> None:
    (finding,) = rnn_vanishing_temporal(seen(stuck(60), 1e-12))
    assert finding.sites == ("0",)
    assert "bias_hh_l0" in finding.remedy


def test_nothing_at_all_that_arrives_is_said_in_words() -> None:
    (finding,) = rnn_vanishing_temporal(seen(stuck(60), 0.0))
    assert "nothing of the gradient reaches it" in finding.message


def test_a_short_memory_is_enough_for_a_task_that_is_learnt() -> None:
    assert not list(rnn_vanishing_temporal(seen(falling(60), 1e-12)))


def test_a_layer_that_remembers_is_not_blamed_for_a_loss_that_does_not_improve() -> None:
    assert not list(rnn_vanishing_temporal(seen(stuck(60), 0.3)))


def test_a_layer_that_multiplies_from_the_start_is_named() -> None:
    (finding,) = rnn_exploding_temporal(seen(stuck(60), 5e4))
    assert "1.31" in finding.message


def test_a_factor_of_a_hundred_at_the_start_is_enough_but_ten_is_not() -> None:
    assert list(rnn_exploding_temporal(seen(stuck(60), 100.0, length=16)))
    assert not list(rnn_exploding_temporal(seen(stuck(60), 10.0, length=16)))


def test_a_layer_that_learnt_to_remember_the_first_input_is_not() -> None:
    assert not list(rnn_exploding_temporal(seen(falling(60), np.geomspace(1.0, 1e3, 60))))


@pytest.mark.parametrize(("rule", "reach"), [(rnn_vanishing_temporal, 1e-12), (rnn_exploding_temporal, 1e9)])
def test_very_short_sequences_and_empty_windows_say_nothing(rule: Rule, reach: float) -> None:
    assert not list(rule(seen(stuck(60), reach, length=4)))
    assert not list(rule(Window()))
