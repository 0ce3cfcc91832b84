"""Outputs that do not depend on the input from the start are a warning; a later collapse is only info."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.rules.rank_collapse import rank_collapse
from sonde.schema.window import Window
from windows import stack, stuck, window

MODEL = stack("Linear 8 8", "Tanh", "Linear 8 8", "Tanh", "Linear 8 3")
INPUT: dict[str, object] = {"data/input/is_token": 0.0, "data/input/sample_std": 1.0}


def test_layers_that_answer_the_same_to_everything_are_named() -> None:
    (finding,) = rank_collapse(window(MODEL, stuck(60), INPUT | {"unit/0/batch_std": 0.9, "unit/2/batch_std": 1e-4}))
    assert (finding.severity, finding.sites) == ("warning", ("2",))


def test_what_comes_later_is_a_remark() -> None:
    spread = np.where(np.arange(60) > 20, 1e-4, 0.8)
    (finding,) = rank_collapse(window(MODEL, stuck(60), INPUT | {"unit/2/batch_std": spread}))
    assert finding.severity == "info"


def test_layers_that_tell_inputs_apart_are_fine() -> None:
    assert not list(rank_collapse(window(MODEL, stuck(60), INPUT | {"unit/2/batch_std": 0.05})))


def test_inputs_that_are_all_the_same_are_not_the_layers_fault() -> None:
    inputs: dict[str, object] = {"data/input/is_token": 0.0, "data/input/sample_std": 0.0}
    assert not list(rank_collapse(window(MODEL, stuck(60), inputs | {"unit/2/batch_std": 1e-4})))


def test_an_empty_window_says_nothing() -> None:
    assert not list(rank_collapse(Window()))
