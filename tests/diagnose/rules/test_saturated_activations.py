"""Hidden units at their ends are named; a sure output, and gates of a net that learns, are not."""

from __future__ import annotations

from sonde.diagnose.rules.saturated_activations import saturated_activations
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 8", "Tanh", "Linear 8 1", "Sigmoid")


def test_a_flat_hidden_layer_of_a_net_that_is_stuck_is_named() -> None:
    (finding,) = saturated_activations(window(MODEL, stuck(100), {"unit/1/saturated": 0.8}))
    assert (finding.severity, finding.sites) == ("warning", ("1",))


def test_an_output_that_is_sure_is_not_saturated() -> None:
    assert not list(saturated_activations(window(MODEL, stuck(100), {"unit/3/saturated": 0.9})))


def test_gates_of_a_net_that_learns_are_a_remark() -> None:
    (finding,) = saturated_activations(window(MODEL, falling(100), {"unit/1/saturated": 0.8}))
    assert finding.severity == "info"


def test_a_third_of_the_units_at_their_ends_is_healthy() -> None:
    assert not list(saturated_activations(window(MODEL, stuck(100), {"unit/1/saturated": 0.33})))


def test_an_empty_window_says_nothing() -> None:
    assert not list(saturated_activations(Window()))
