"""By heart, not at all, or with too much dropped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from sonde.diagnose.rule import Rule
from sonde.diagnose.rules.excessive_dropout import excessive_dropout
from sonde.diagnose.rules.overfitting import overfitting
from sonde.diagnose.rules.underfitting import underfitting
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 16", "ReLU", "Linear 16 10")
SEEN = {"data/loss/baseline": float(np.log(10)), "data/output/width": 10}


def with_validation(loss: Array, val: list[float], series: Mapping[str, object]) -> Window:
    made = window(MODEL, loss, series)
    steps = np.linspace(len(loss) // len(val), len(loss) - 1, len(val)).astype(np.int64)
    return Window(made.series, {**made.scalars, "val_loss": (steps, np.array(val))}, made.facts)


def test_validation_that_turns_while_training_falls() -> None:
    (finding,) = overfitting(with_validation(falling(100, 2.3, 0.001), [1.3, 1.1, 1.2, 1.4, 1.6], SEEN))
    assert (finding.severity, finding.step) == ("warning", 39)
    assert "step 39" in finding.remedy


@pytest.mark.parametrize(
    ("end", "val"),
    [
        (0.01, [1.3, 0.8, 0.5, 0.4, 0.4]),
        (0.01, [0.30, 0.20, 0.25, 0.30, 0.35]),
        (1.0, [1.3, 1.1, 1.2, 1.4, 1.6]),
        (0.01, [1.8, 1.6, 1.5, 1.2, 1.6]),
        (0.05, [0.9, 0.65, 0.8, 0.75, 0.9, 0.85, 1.0, 0.95]),
    ],
    ids=["a gap without a turn", "still good", "no gap", "only the last point", "up and down"],
)
def test_a_gap_alone_is_not_overfitting(end: float, val: list[float]) -> None:
    assert not list(overfitting(with_validation(falling(100, 2.3, end), val, SEEN)))


def test_a_rise_without_a_pause_counts_earlier() -> None:
    rising = [0.9, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
    assert list(overfitting(with_validation(falling(100, 2.3, 0.05), rising, SEEN)))


def test_where_most_answers_are_right_it_is_a_remark() -> None:
    made = with_validation(falling(100, 2.3, 0.001), [1.3, 1.1, 1.2, 1.4, 1.6], SEEN)
    accuracy = {"val_acc": (made.scalars["val_loss"][0], np.full(5, 0.93))}
    (finding,) = overfitting(Window(made.series, {**made.scalars, **accuracy}, made.facts))
    assert finding.severity == "info"


def test_sums_over_sets_of_different_sizes_are_not_compared() -> None:
    series = {**SEEN, "data/loss/reduction": 1}
    assert not list(overfitting(with_validation(falling(100, 2.3, 0.001), [1.3, 1.1, 1.2, 1.4, 1.6], series)))


def test_a_loss_that_stays_near_guessing() -> None:
    (finding,) = underfitting(window(MODEL, stuck(100), SEEN))
    assert finding.confidence <= 0.5


def test_what_noise_leaves_is_not_underfitting() -> None:
    assert not list(underfitting(window(MODEL, stuck(100, 1.5), SEEN)))
    assert not list(underfitting(window(MODEL, stuck(100), {"data/output/width": 10})))


def test_a_small_model_is_suspected_earlier() -> None:
    assert list(underfitting(window(stack("Linear 8 10"), stuck(100, 1.6), SEEN)))
    assert list(underfitting(window(stack("Linear 8 2", "ReLU", "Linear 2 10"), stuck(100, 1.6), SEEN)))


def test_adapters_are_narrow_by_design() -> None:
    document = stack("Linear 8 2", "ReLU", "Linear 2 10")
    document["parameters"][0]["name"] = "0.lora_A.weight"
    assert not list(underfitting(window(document, stuck(100, 1.6), SEEN)))


def dropping(p: float) -> dict[str, object]:
    model = stack("Linear 8 16", "ReLU", "Dropout", "Linear 16 10")
    model["modules"][2]["p"] = p
    return model


def test_strong_dropout_that_does_harm() -> None:
    (finding,) = excessive_dropout(window(dropping(0.9), stuck(100), SEEN))
    assert finding.sites == ("2",)
    assert "now 0.9" in finding.remedy


@pytest.mark.parametrize(("p", "loss"), [(0.5, stuck(100)), (0.9, falling(100))])
def test_usual_dropout_and_dropout_that_does_no_harm(p: float, loss: Array) -> None:
    assert not list(excessive_dropout(window(dropping(p), loss, SEEN)))


@pytest.mark.parametrize("rule", [overfitting, underfitting, excessive_dropout])
def test_an_empty_window_says_nothing(rule: Rule) -> None:
    assert not list(rule(Window()))
