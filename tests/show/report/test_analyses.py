"""The standard analyses: the verdict follows from the data, and the numbers are those of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sonde
from sonde.schema.window import Window
from sonde.show.analyses.analysis import Analysis
from sonde.show.analyses.convergence import convergence
from sonde.show.analyses.gradient_flow import gradient_flow
from sonde.show.analyses.layers import measure
from sonde.show.analyses.overfitting import overfitting
from sonde.show.analyses.weights import weights

STEPS = np.arange(300)
NOISE = 1 + 0.02 * np.sin(37.0 * STEPS)


def window(**scalars: Any) -> Window:
    columns = {name.replace("__", "/"): (np.arange(len(v)), np.asarray(v, float)) for name, v in scalars.items()}
    return Window(scalars=columns)


def converged() -> np.ndarray:
    return (0.1 + 3.0 * np.exp(-STEPS / 20)) * NOISE


CURVES = {
    "converged": (converged(), "good", "has converged"),
    "still falling": ((3.0 - 0.008 * STEPS) * NOISE, "watch", "still falling"),
    "flat": (2.0 * NOISE, "bad", "did not improve"),
    "rising": (2.0 * NOISE + 0.01 * STEPS, "bad", "diverged: it rose from 2 to"),
    "turned": ((1.0 + ((STEPS - 150) / 100) ** 2) * NOISE, "watch", "has risen"),
    "broken": (np.where(STEPS < 200, converged(), np.nan), "bad", "at step 200"),
    "huge": (np.where(STEPS % 2, 1.7e308, -1.7e308), "bad", "did not improve"),
    "two values": (np.ones(2), "unknown", "2 finite values"),
}


@pytest.mark.parametrize("name", CURVES)
def test_verdict_on_the_loss_is_that_of_its_curve(name: str) -> None:
    values, tone, said = CURVES[name]
    found = convergence(window(loss=values))
    assert found.tone == tone, found.verdict
    assert said in found.verdict


def test_numbers_of_convergence_are_those_of_the_curve() -> None:
    values = converged()
    values[200] = 50.0
    found = convergence(window(loss=values, lr=np.full(300, 0.1)))
    assert found["last level"] == pytest.approx(0.1, rel=0.03)
    assert found["spikes"] == 1
    assert found["not finite"] == 0
    assert 35 <= (found["90 % step"] or 0) <= 60  # 20 ln 10 is 46
    assert [chart.title for chart in found.charts] == ["loss over steps", "lr over steps"]


def test_long_loss_is_smoothed_by_blocks_and_says_the_same() -> None:
    steps = np.arange(100_000)
    noise = 1 + 0.1 * np.random.default_rng(0).normal(size=len(steps))
    long = convergence(window(loss=(0.1 + 3.0 * np.exp(-steps / 7000)) * noise))
    short = convergence(window(loss=((0.1 + 3.0 * np.exp(-steps / 7000)) * noise)[::100]))
    assert (long.tone, short.tone) == ("good", "good")
    for name in ("last level", "best level", "90 % step", "noise"):
        factor = 100 if name == "90 % step" else 1
        assert long[name] == pytest.approx((short[name] or 0) * factor, rel=0.1), name


def test_loss_that_falls_by_decades_is_drawn_on_a_logarithmic_axis() -> None:
    assert convergence(window(loss=10.0 ** (-STEPS / 50))).charts[0].is_log
    assert not convergence(window(loss=3.0 - 0.005 * STEPS)).charts[0].is_log


def test_without_a_loss_it_says_what_to_log() -> None:
    assert "sonde.log" in convergence(window(other=np.ones(50))).verdict


def validation(values: Any) -> Window:
    train = (np.arange(300), converged())
    return Window(scalars={"loss": train, "val/loss": (np.arange(0, 300, 10), np.asarray(values, float))})


def test_validation_that_turns_is_overfitting_from_its_best_step_on() -> None:
    at = np.arange(30)
    found = overfitting(validation(0.5 + 0.02 * (at - 8) ** 2))
    assert found.tone == "bad"
    assert found["best step"] == 80
    assert found.charts[0].marks == ((80, "best validation"),)
    assert "step 80" in found.verdict


def test_validation_that_follows_is_not() -> None:
    found = overfitting(validation(1.1 * converged()[::10]))
    assert found.tone == "good"
    assert found["gap"] == pytest.approx(1.1, rel=0.1)


def test_validation_that_lags_without_turning_is_worth_checking() -> None:
    assert overfitting(validation(4 * converged()[::10])).tone == "watch"


def test_without_validation_it_says_what_to_log() -> None:
    found = overfitting(window(loss=converged()))
    assert (found.tone, "val/loss" in found.verdict) == ("unknown", True)


@pytest.mark.parametrize("values", [[np.nan] * 30, [1.0, 2.0]])
def test_validation_that_cannot_be_judged_is_not(values: list[float]) -> None:
    assert overfitting(validation(values if len(values) == 30 else [*values, *[np.nan] * 28])).tone == "unknown"


def falling(step: int) -> float:
    return 3.0 / (1 + step)


def test_gradients_that_vanish_towards_the_input_are_reported(begin: Any) -> None:
    run = sonde.open(begin(layers=[f"{n}.weight" for n in range(7)]).steps(40, falling).finish())
    found = gradient_flow(run)
    assert found.tone == "bad", found.verdict
    assert "vanish" in found.verdict
    assert (found["lean"] or 1) < 1e-4  # each layer has a tenth of the gradient of the next
    assert found["spread"] == pytest.approx(6, abs=0.5)
    assert found.charts[0].places[0] == "0.weight"
    assert [row[0] for row in found.tables[0].rows] == [f"{n}.weight" for n in range(7)]


def test_first_nonfinite_gradient_is_named_with_its_step(begin: Any) -> None:
    run = sonde.open(begin().steps(400, falling, nan_at=333).finish())
    found = gradient_flow(run)
    assert found.tone == "bad"
    assert "layers.1.weight at step 333" in found.verdict
    assert found["not finite"] == 1
    assert weights(run).tone != "bad"


def test_growth_of_weights_is_measured(begin: Any) -> None:
    run = sonde.open(begin().steps(40, falling).finish())
    found = weights(run)
    assert found.tone == "good", found.verdict
    assert found["growth, median"] == pytest.approx(1.39, rel=0.3)  # 1 + 0.01 * 39, of 32 random numbers
    assert {line.name for chart in found.charts for line in chart.lines} >= {"median", "95 %", "largest"}


def test_runs_without_gradients_or_weights_say_so(begin: Any) -> None:
    run = sonde.open(begin(layers=()).steps(5, falling).finish())
    assert (gradient_flow(run).tone, weights(run).tone) == ("unknown", "unknown")


def test_no_analysis_raises_on_an_empty_run(begin: Any) -> None:
    run = sonde.open(begin(layers=()).finish())
    found: list[Analysis] = [convergence(run.window(())), overfitting(run.window(())), gradient_flow(run), weights(run)]
    assert {one.tone for one in found} == {"unknown"}


def test_the_finite_part_of_a_tensor_that_is_partly_nan_does_not_measure_it(begin: Any) -> None:
    path = begin().steps(40, lambda step: 1.0, nan_at=30).finish()
    measured = measure(sonde.open(path), "grad", ("rms",))
    assert measured is not None
    values = measured.stats["rms"].values
    assert np.argwhere(np.isnan(values)).tolist() == [[2, 30]]
