"""The final loss relative to its start and to a constant prediction."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.measures.loss import Learned, learned
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stuck, window


def of(loss: Array, **series: object) -> Learned:
    found = learned(window({}, loss, {name.replace("__", "/"): values for name, values in series.items()}))
    assert found is not None
    return found


def test_the_final_loss_is_relative_to_the_start() -> None:
    assert of(falling(100, 2.0, 0.1)).left == pytest.approx(0.05, rel=0.2)
    assert of(stuck(100)).left == pytest.approx(1.0, rel=0.02)


def test_a_start_above_a_constant_prediction_is_measured_by_that() -> None:
    found = of(np.r_[500.0, stuck(99)], data__loss__baseline=2.3, data__loss__value=np.r_[500.0, stuck(99)])
    assert found.left == pytest.approx(1.0, rel=0.02)
    assert (
        found.outcome
        == "the model is no better than always predicting a constant (its loss is 100 % of a constant prediction's)"
    )


@pytest.mark.parametrize(
    ("loss", "outcome"),
    [
        (np.full(100, 2.0), "the loss has not improved (100 % of its starting value)"),
        (np.r_[2.0, np.full(99, 1.5)], "the loss is still at 75 % of its starting value"),
        (np.r_[2.0, np.full(99, 3.0)], "the loss ends at 150 % of its starting value"),
        (np.r_[falling(10), np.full(15, np.nan)], "the loss is NaN or infinite at the end"),
        (np.linspace(-1.0, -2.0, 100), "the loss ends at -1.95"),
    ],
    ids=["flat", "slow", "rising", "diverged", "negative"],
)
def test_the_outcome_says_how_far_the_loss_fell(loss: Array, outcome: str) -> None:
    assert of(loss).outcome == outcome


def test_guessing_is_scaled_to_the_logged_loss() -> None:
    found = of(1000 * stuck(100), data__loss__baseline=2.3, data__loss__value=stuck(100))
    assert found.guessing == pytest.approx(2300.0)


def test_a_loss_that_is_mixed_with_another_has_no_guess() -> None:
    """Half a cross-entropy that stays, half a distance to a teacher that falls: the baseline is of the first half."""
    hard = stuck(100, 1.4)
    mixed = 0.5 * hard + 0.5 * falling(100, 6.0, 1.0)
    assert np.isnan(of(mixed, data__loss__baseline=1.38, data__loss__value=hard).guessing)
    with_penalty = falling(100, 1.4, 0.2) + 0.3
    found = of(with_penalty, data__loss__baseline=1.38, data__loss__value=falling(100, 1.4, 0.2))
    assert np.isfinite(found.guessing)


def test_a_sum_is_not_compared_with_the_guess_of_a_mean() -> None:
    assert np.isnan(of(stuck(100), data__loss__baseline=2.3, data__loss__reduction=1.0).guessing)


def test_a_loss_that_ends_without_a_number_has_diverged() -> None:
    assert of(np.r_[falling(10), np.full(15, np.nan)]).has_diverged


def test_too_little_says_nothing() -> None:
    assert learned(Window()) is None
    assert learned(window({}, falling(8), {})) is None
    assert learned(window({}, np.full(30, np.nan), {})) is None
