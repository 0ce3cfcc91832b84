"""Dead layers are a warning if the network does not learn; spare dead units, and late ones, are not."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.rules.dead_relu import dead_relu
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 8", "ReLU", "Linear 8 3", lr=0.5)


def test_a_dead_layer_of_a_net_that_is_stuck_is_named_with_its_beginning() -> None:
    dead = np.where(np.arange(100) >= 40, 0.9, 0.1)
    (finding,) = dead_relu(window(MODEL, stuck(100), {"unit/1/dead": dead}))
    assert (finding.severity, finding.step, finding.sites) == ("warning", 40, ("1",))
    assert "0.05" in finding.remedy


def test_dead_units_of_a_net_that_learns_are_a_remark() -> None:
    (finding,) = dead_relu(window(MODEL, falling(100), {"unit/1/dead": 0.6}))
    assert finding.severity == "info"


def test_activations_as_functions_show_in_the_inputs_of_the_next_layer() -> None:
    (finding,) = dead_relu(window(MODEL, stuck(100), {"unit/2/input_dead": 1.0}))
    assert "inputs of 2 (Linear)" in finding.message


def test_half_of_the_units_may_be_silent() -> None:
    assert not list(dead_relu(window(MODEL, stuck(100), {"unit/1/dead": 0.45})))


def test_what_comes_at_the_very_end_has_not_lasted() -> None:
    dead = np.where(np.arange(100) >= 95, 1.0, 0.0)
    assert not list(dead_relu(window(MODEL, stuck(100), {"unit/1/dead": dead})))


def test_an_empty_window_says_nothing() -> None:
    assert not list(dead_relu(Window()))
