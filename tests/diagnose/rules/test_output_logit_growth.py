"""Output logits beyond all need are named; those that grow to fit the data, or began large, are not."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.rules.output_logit_growth import output_logit_growth
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window


def seen(loss: Array, logit: object, log_z: object) -> Window:
    numbers = {"data/output/logit_max": logit, "data/output/log_z": log_z, "data/output/width": 24}
    return window(stack(), loss, {**numbers, "data/target/is_class": 1})


def test_logits_that_drift_while_nothing_is_learnt_are_named() -> None:
    (finding,) = output_logit_growth(seen(stuck(60), np.geomspace(0.5, 90, 60), np.linspace(3.2, 80, 60)))
    assert "logsumexp" in finding.remedy


def test_logits_of_data_that_are_fitted_may_grow() -> None:
    assert not list(output_logit_growth(seen(falling(60), np.geomspace(0.5, 90, 60), np.linspace(3.2, 80, 60))))


def test_logits_that_began_large_have_not_grown() -> None:
    assert not list(output_logit_growth(seen(stuck(60), np.linspace(800, 300, 60), 200.0)))


def test_huge_logits_of_fitted_data_are_named_when_they_hurt_held_out_data() -> None:
    found = seen(falling(60), np.geomspace(0.5, 900, 60), np.linspace(3.2, 80, 60))
    steps = np.arange(0, 60, 10)
    losses = np.array([3.0, 1.0, 0.5, 1.0, 2.0, 3.0])
    assert list(output_logit_growth(Window(found.series, {**found.scalars, "val_loss": (steps, losses)}, found.facts)))
    assert not list(output_logit_growth(found))


def test_a_learnt_temperature_beyond_a_hundred_is_named() -> None:
    found = seen(falling(60), np.geomspace(5.0, 900, 60), np.linspace(3.2, 80, 60))
    scale = {"name": "scale", "shape": [], "owner": "", "module_type": "Clip"}
    with_scale = {**found.facts, "model": {**stack(), "parameters": [scale]}}
    (finding,) = output_logit_growth(Window(found.series, found.scalars, with_scale))
    assert "clamp" in finding.remedy


def test_an_empty_window_says_nothing() -> None:
    assert not list(output_logit_growth(Window()))
