"""Spikes, bad batches, swings, plateaus and divergence are named; the noise of small batches is not."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.rules.adam_second_moment_underestimate import adam_second_moment_underestimate
from sonde.diagnose.rules.bad_batches import bad_batches
from sonde.diagnose.rules.loss_divergence import loss_divergence
from sonde.diagnose.rules.loss_drop import loss_drop
from sonde.diagnose.rules.loss_oscillation import loss_oscillation
from sonde.diagnose.rules.loss_plateau import loss_plateau
from sonde.diagnose.rules.loss_spikes import loss_spikes
from sonde.diagnose.rules.memory_spike import memory_spike
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

STEPS = 120
NET = stack("Linear 16 16", "ReLU", "Linear 16 4")
AT = [50, 80, 110]


def at(steps: list[int], value: float, usual: float) -> Array:
    values = np.full(STEPS, usual)
    values[steps] = value
    return values


def spiky(height: float = 20.0) -> Array:
    loss = falling(STEPS)
    loss[AT] = height
    return loss


def seen(loss: Array, gradient: object = 1.0, update: object = 0.02, lag: object = 1.0) -> Window:
    names = {
        "grad/0.weight/norm_preclip": gradient,
        "update/0.weight/norm": update,
        "update/0.weight/second_moment_lag": lag,
        "param/0.weight/norm": 4.0,
        "data/batch/hash": np.arange(STEPS) + 255.0,
    }
    return window(NET, loss, names)


def test_several_spikes_are_named_with_their_steps() -> None:
    (finding,) = loss_spikes(seen(spiky()))
    assert (finding.step, finding.last_step) == (50, 110)
    assert "50, 80, 110" in finding.message


def test_noise_of_small_batches_and_doubling_near_zero_are_no_spikes() -> None:
    rng = np.random.default_rng(0)
    assert not list(loss_spikes(seen(rng.gamma(2.0, 0.5, STEPS))))
    assert not list(loss_spikes(seen(np.r_[2.3, 1e-3 * rng.lognormal(0, 1.5, STEPS - 1)])))


def test_one_spike_is_a_remark() -> None:
    loss = falling(STEPS)
    loss[70] = 5.0
    (finding,) = loss_spikes(seen(loss))
    assert finding.severity == "info"
    loss[70] = 500.0  # 1,700 times the recent level
    (finding,) = loss_spikes(seen(loss))
    assert (finding.severity, finding.step) == ("warning", 70)


def test_a_fall_followed_by_a_rise_is_a_divergence_from_the_step_at_which_it_turned() -> None:
    loss = np.concatenate([np.geomspace(8.9, 0.7, 60), np.geomspace(0.7, 20.0, 60)])
    (finding,) = loss_divergence(seen(loss))
    assert 58 <= finding.step <= 66
    assert not list(loss_divergence(seen(np.geomspace(8.9, 0.7, 120))))


def test_a_loss_that_swings_back_to_its_lowest_level_has_not_diverged() -> None:
    swings = np.where(np.arange(119) % 3 == 0, 0.6, 5.0)
    assert not list(loss_divergence(seen(np.r_[1.6, swings])))
    assert list(loss_divergence(seen(np.r_[1.6, np.full(59, 0.6), np.full(60, 5.0)])))


def test_a_drop_within_one_step_is_named_and_a_fast_fall_is_not() -> None:
    loss = np.concatenate([np.full(60, 1.5), np.full(60, 0.1)])
    (finding,) = loss_drop(seen(loss))
    assert (finding.severity, finding.step) == ("warning", 60)
    gradual = np.concatenate([np.full(50, 1.5), np.geomspace(1.5, 0.1, 10), np.full(60, 0.1)])
    assert not list(loss_drop(seen(gradual)))


def test_a_short_jump_of_memory_is_reported_and_steady_memory_is_not() -> None:
    steps, sizes = np.arange(0, 100, 10), np.full(10, 1000.0)
    assert not list(memory_spike(Window(scalars={"system/process_rss_mib": (steps, sizes)})))
    sizes = np.where(steps == 50, 2000.0, sizes)
    (finding,) = memory_spike(Window(scalars={"system/process_rss_mib": (steps, sizes)}))
    assert (finding.severity, finding.step) == ("info", 50)
    used = np.where(steps == 50, 95.0, 40.0)
    scalars = {"system/process_rss_mib": (steps, sizes), "system/memory_percent": (steps, used)}
    (finding,) = memory_spike(Window(scalars=scalars))
    assert finding.severity == "warning"


def test_batches_on_which_loss_and_gradient_jump_at_once_are_named_with_their_identity() -> None:
    (finding,) = bad_batches(seen(spiky(), at(AT, 50.0, 1.0)))
    assert finding.step == 50
    assert f"50 (batch {50 + 255:x})" in finding.message


def test_a_jump_after_an_unusual_update_is_the_steps_fault() -> None:
    before = [step - 1 for step in AT]
    assert not list(bad_batches(seen(spiky(), at(AT, 50.0, 1.0), at(before, 2.0, 0.02))))


def test_a_jump_without_a_large_gradient_is_not_a_bad_batch() -> None:
    assert not list(bad_batches(seen(spiky(), 1.0)))


def test_spikes_that_follow_a_lag_of_the_second_moment_are_named() -> None:
    (finding,) = adam_second_moment_underestimate(seen(spiky(), lag=at([step - 3 for step in AT], 40.0, 1.0)))
    assert finding.sites == ("0.weight",)


@pytest.mark.parametrize("lag", [1.0, 40.0, at(AT, 40.0, 1.0)])
def test_a_lag_that_is_absent_or_constant_or_comes_with_the_spike_foretells_nothing(lag: object) -> None:
    assert not list(adam_second_moment_underestimate(seen(spiky(), lag=lag)))


SWINGING = np.r_[2.3, 1.6 + 1.2 * np.sin(np.arange(STEPS - 1))]


def test_a_loss_that_swings_under_large_steps_is_named() -> None:
    assert list(loss_oscillation(seen(SWINGING, update=0.4)))


def test_a_loss_that_swings_under_small_steps_has_batches_that_differ() -> None:
    assert not list(loss_oscillation(seen(SWINGING, update=0.004)))


def test_a_loss_that_settles_does_not_swing() -> None:
    assert not list(loss_oscillation(seen(falling(STEPS), update=0.4)))


@pytest.mark.parametrize("num_waiting", [0, 50, 80])
def test_a_loss_that_is_still_falling_at_the_end_does_not_swing(num_waiting: int) -> None:
    """Its range is as wide as that of a swing, as where a backbone is frozen for the first half of a run."""
    rng = np.random.default_rng(0)
    loss = np.r_[np.full(num_waiting, 2.3), np.linspace(2.3, 0.8, STEPS - num_waiting)]
    assert not list(loss_oscillation(seen(loss + rng.normal(0.0, 0.1, STEPS), update=0.4)))


def test_a_loss_that_swings_and_sinks_is_named() -> None:
    assert list(loss_oscillation(seen(SWINGING - np.linspace(0.0, 0.3, STEPS), update=0.4)))


def test_a_standing_loss_is_a_remark_and_a_falling_one_is_nothing() -> None:
    (finding,) = loss_plateau(seen(stuck(STEPS)))
    assert finding.severity == "info"
    assert not list(loss_plateau(seen(falling(STEPS))))


def test_a_loss_that_runs_away_is_named_since_it_left_its_start() -> None:
    (finding,) = loss_divergence(seen(np.r_[falling(40, 2.3, 1.0), np.geomspace(1.0, 100.0, STEPS - 40)]))
    assert 40 < finding.step < 80
    assert not list(loss_divergence(seen(stuck(STEPS))))


def test_empty_windows_say_nothing() -> None:
    for rule in (
        *(loss_spikes, bad_batches, adam_second_moment_underestimate),
        *(loss_oscillation, loss_plateau, loss_divergence),
    ):
        assert not list(rule(Window()))
