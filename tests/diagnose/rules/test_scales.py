"""Inputs and targets on a scale the model was not made for; what is normalised elsewhere, or learned, is not blamed."""

from __future__ import annotations

import pytest

from sonde.diagnose.rule import Rule
from sonde.diagnose.rules.degenerate_inputs import degenerate_inputs
from sonde.diagnose.rules.unnormalised_inputs import unnormalised_inputs
from sonde.diagnose.rules.unnormalised_targets import unnormalised_targets
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 16", "ReLU", "Linear 16 5")
STANDARD = {
    "data/input/std": 1.0, "data/input/mean": 0.0, "data/input/abs_max": 4.0, "data/input/is_token": 0,
    "data/input/feature_std_ratio": 1.3, "data/input/feature_abs_max_ratio": 2.0, "data/input/size": 32,
}  # fmt: skip
PIXELS = {**STANDARD, "data/input/std": 80.0, "data/input/mean": 90.0, "data/input/abs_max": 255.0}
UNITS = {**STANDARD, "data/input/feature_std_ratio": 3000, "data/input/feature_abs_max_ratio": 2000}
TARGETS = {"data/target/is_class": 0, "data/target/std": 5e4, "data/target/mean": 2e5, "data/output/logit_max": 0.7}


def test_large_inputs_are_named() -> None:
    (finding,) = unnormalised_inputs(window(MODEL, stuck(30), PIXELS))
    assert (finding.severity, finding.sites) == ("warning", ("0.weight",))
    assert "255" in finding.message


def test_features_in_different_units_are_named() -> None:
    (finding,) = unnormalised_inputs(window(MODEL, stuck(30), {**UNITS, "data/input/abs_max": 1500.0}))
    assert "3,000" in finding.message


def test_tiny_inputs_are_named_when_nothing_is_learned() -> None:
    tiny = {**STANDARD, "data/input/std": 1e-4, "data/input/abs_max": 4e-4}
    assert list(unnormalised_inputs(window(MODEL, stuck(30), tiny)))
    assert not list(unnormalised_inputs(window(MODEL, falling(30), tiny)))


@pytest.mark.parametrize(
    "series",
    [
        STANDARD,
        {**STANDARD, "data/input/std": 0.3, "data/input/mean": 0.4, "data/input/abs_max": 1.0},
        {**PIXELS, "data/input/is_token": 1},
        {**STANDARD, "data/input/feature_std_ratio": 400},
    ],
    ids=["standardised", "unit pixels", "tokens", "sparse"],
)
def test_usual_inputs_are_left_alone(series: dict[str, object]) -> None:
    assert not list(unnormalised_inputs(window(MODEL, stuck(30), series)))


def test_large_inputs_that_are_learned_all_the_same_are_a_remark() -> None:
    (finding,) = unnormalised_inputs(window(MODEL, falling(60), PIXELS))
    assert finding.severity == "info"


def test_a_norm_in_front_takes_care_of_it() -> None:
    model = stack("BatchNorm1d", "Linear 8 16", "ReLU", "Linear 16 5")
    assert not list(unnormalised_inputs(window(model, stuck(30), PIXELS)))


def test_a_model_that_divides_by_itself_is_spared() -> None:
    inside = {**PIXELS, "act/0/rms": 0.5, "param/0.weight/rms": 0.3}
    as_given = {**PIXELS, "act/0/rms": 100.0, "param/0.weight/rms": 0.3}
    assert not list(unnormalised_inputs(window(MODEL, stuck(30), inside)))
    assert list(unnormalised_inputs(window(MODEL, stuck(30), as_given)))


def test_a_single_bad_batch_is_not_the_scale_of_the_data() -> None:
    series = dict(STANDARD)
    loss = stuck(30)
    series["data/input/std"] = [200.0 if step % 10 == 9 else 1.0 for step in range(30)]  # type: ignore[assignment]
    assert not list(unnormalised_inputs(window(MODEL, loss, series)))


def test_targets_far_from_the_outputs_are_named_until_they_are_learned() -> None:
    regression = {**MODEL, "loss": "mse_loss"}
    (finding,) = unnormalised_targets(window(regression, stuck(30, 4e10), TARGETS))
    assert finding.severity == "warning"
    (finding,) = unnormalised_targets(window(regression, falling(30, 4e10, 1e8), TARGETS))
    assert finding.severity == "info"
    small = {**TARGETS, "data/target/std": 8.0, "data/target/mean": 20.0}
    assert not list(unnormalised_targets(window(regression, stuck(30, 400.0), small)))


def test_samples_that_are_all_alike_are_named() -> None:
    same = {**STANDARD, "data/input/sample_std": 0.0, "data/input/abs_max": 0.0}
    (finding,) = degenerate_inputs(window(MODEL, stuck(30), same))
    assert "zero" in finding.message
    assert not list(degenerate_inputs(window(MODEL, stuck(30), {**same, "data/input/sample_std": 0.2})))
    assert not list(degenerate_inputs(window(MODEL, stuck(30), {**same, "data/input/size": 1})))


@pytest.mark.parametrize("rule", [unnormalised_inputs, unnormalised_targets, degenerate_inputs])
def test_an_empty_window_says_nothing(rule: Rule) -> None:
    assert not list(rule(Window()))
