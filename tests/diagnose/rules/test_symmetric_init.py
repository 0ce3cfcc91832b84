"""Units that stay the same are named; heads and branches that start at zero and part are not."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.rules.symmetric_init import symmetric_init
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 16", "Tanh", "Linear 16 16", "Tanh", "Linear 16 3")


def test_units_that_never_part_are_named() -> None:
    (finding,) = symmetric_init(window(MODEL, stuck(60), {"unit/0.weight/row_spread": 0.0, "param/0.weight/norm": 0.0}))
    assert finding.sites == ("0.weight",)
    assert "zeros" in finding.message


def test_units_that_part_with_the_first_step_are_fine() -> None:
    spread = np.where(np.arange(60) == 0, 0.0, 2.0)
    assert not list(symmetric_init(window(MODEL, stuck(60), {"unit/2.weight/row_spread": spread})))


def test_two_layers_in_a_row_that_start_the_same_are_named_even_if_noise_parts_them() -> None:
    parting = np.linspace(0.0, 1.0, 60)
    spreads = {"unit/0.weight/row_spread": parting, "unit/2.weight/row_spread": parting}
    (finding,) = symmetric_init(window(MODEL, stuck(60), spreads))
    assert finding.sites == ("0.weight", "2.weight")


def test_two_layers_that_start_the_same_and_part_at_once_are_fine() -> None:
    """Side by side, as the offsets and the weights of deformable attention, which begin at zero."""
    spread = np.where(np.arange(60) == 0, 0.0, 2.0)
    spreads = {"unit/0.weight/row_spread": spread, "unit/2.weight/row_spread": spread}
    assert not list(symmetric_init(window(MODEL, stuck(60), spreads)))


def test_most_layers_of_zeros_are_named_even_if_biases_part_their_units() -> None:
    spread = np.where(np.arange(60) == 0, 0.0, 2.0)
    zero = {f"param/{site}.weight/norm": np.linspace(0.0, 0.1, 60) for site in (0, 2, 4)}
    spreads = {f"unit/{site}.weight/row_spread": spread for site in (0, 2, 4)}
    (finding,) = symmetric_init(window(MODEL, stuck(60), {**zero, **spreads}))
    assert finding.sites == ("0.weight", "2.weight", "4.weight")
    assert not list(symmetric_init(window(MODEL, falling(60), {**zero, **spreads}))), "it learns anyway"
    del zero["param/0.weight/norm"], zero["param/2.weight/norm"]
    assert not list(symmetric_init(window(MODEL, stuck(60), {**zero, **spreads}))), "only the head"


def test_a_head_of_zeros_is_fine() -> None:
    assert not list(symmetric_init(window(MODEL, stuck(60), {"unit/4.weight/row_spread": 0.0})))


def test_frozen_weights_are_nobodys_business() -> None:
    frozen = {**MODEL, "parameters": [{**p, "trainable": False} for p in MODEL["parameters"]]}
    assert not list(symmetric_init(window(frozen, stuck(60), {"unit/0.weight/row_spread": 0.0})))


def test_an_empty_window_says_nothing() -> None:
    assert not list(symmetric_init(Window()))
