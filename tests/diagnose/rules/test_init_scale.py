"""Weights far too wide or small are named by what they do to the first loss and the signal, not by their size alone."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.rules.init_scale import init_scale
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 64 64", "ReLU", "Linear 64 64", "ReLU", "Linear 64 64", "ReLU", "Linear 64 10")
SITES = ("0", "2", "4", "6")


def weights(rms: float) -> dict[str, object]:
    return {**{f"param/{site}.weight/rms": rms for site in SITES}, "data/loss/baseline": 2.3}


def test_wide_weights_with_a_first_loss_far_from_guessing_are_named() -> None:
    (finding,) = init_scale(window(MODEL, np.concatenate([[900.0], stuck(99, 5.0)]), weights(1.0)))
    assert "too wide" in finding.message


def test_wide_weights_that_do_no_harm_are_fine() -> None:
    assert not list(init_scale(window(MODEL, falling(100, start=2.4), weights(1.0))))


def test_a_large_first_loss_of_well_scaled_weights_is_not_theirs() -> None:
    assert not list(init_scale(window(MODEL, np.concatenate([[900.0], stuck(99, 5.0)]), weights(0.17))))


def test_wide_weights_that_saturate_from_the_start_are_named_whatever_the_first_loss() -> None:
    model = stack("Linear 64 64", "Tanh", "Linear 64 64", "Tanh", "Linear 64 10")
    series = {f"param/{site}.weight/rms": 1.0 for site in ("0", "2")} | {"data/loss/baseline": 2.3}
    (finding,) = init_scale(window(model, stuck(100), {**series, "unit/1/saturated": 0.4}))
    assert finding.sites == ("0.weight",)
    assert not list(init_scale(window(model, stuck(100), {**series, "unit/1/saturated": 0.05})))
    assert not list(init_scale(window(model, falling(100), {**series, "unit/1/saturated": 0.4})))


def test_wide_weights_before_a_first_loss_of_nan_are_its_cause() -> None:
    (finding,) = init_scale(window(MODEL, np.full(30, np.nan), weights(8.0)))
    assert finding.severity == "critical"
    assert not list(init_scale(window(MODEL, np.full(30, np.nan), weights(0.17))))


def test_small_weights_through_which_nothing_passes_are_named() -> None:
    signal = {f"unit/{site}/batch_std": 0.9 for site in SITES} | {
        f"act/{site}/rms": size for site, size in zip(SITES, (1e-2, 1e-4, 1e-6, 1e-8), strict=True)
    }
    (finding,) = init_scale(window(MODEL, stuck(100), weights(1e-3) | signal))
    assert "too small" in finding.message


def test_small_weights_before_a_norm_are_fine() -> None:
    model = stack("Linear 64 64", "LayerNorm", "ReLU", "Linear 64 64", "LayerNorm", "ReLU", "Linear 64 10")
    series = {f"param/{site}.weight/rms": 1e-3 for site in ("0", "3", "6")} | {"data/loss/baseline": 2.3}
    assert not list(init_scale(window(model, stuck(100), series)))


def test_an_empty_window_says_nothing() -> None:
    assert not list(init_scale(Window()))
