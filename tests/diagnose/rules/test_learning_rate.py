"""A learning rate that is too high, too low, dies away or never arrives is named; large harmless steps are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from sonde.diagnose.check import check
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rules.lr_decay_too_fast import lr_decay_too_fast
from sonde.diagnose.rules.lr_not_applied import lr_not_applied
from sonde.diagnose.rules.lr_too_high import lr_too_high
from sonde.diagnose.rules.lr_too_low import lr_too_low
from sonde.diagnose.rules.missing_warmup import missing_warmup, postnorm_blocks
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

STEPS = 100
NET = stack("Linear 16 16", "ReLU", "Linear 16 4", lr=0.5)
BIG = np.r_[[9.0, 6.0, 3.0], np.full(STEPS - 3, 0.05)]
"""Norms of updates of a weight of norm 4: the first is twice as large as the weight."""


def moved(loss: Array, update: object, *, weight: object = 4.0, rate: Any = 0.5, **more: object) -> Window:
    names = {f"update/{w}.weight/norm": update for w in "02"} | {f"param/{w}.weight/norm": weight for w in "02"}
    made = window(NET, loss, {**names, **{name.replace("__", "/"): value for name, value in more.items()}})
    return made if rate is None else with_scalars(made, {"optim/lr": np.broadcast_to(rate, loss.shape)})


def with_scalars(made: Window, scalars: Mapping[str, Array]) -> Window:
    steps = made.scalars["loss"][0]
    return Window(made.series, {**made.scalars, **{name: (steps, v) for name, v in scalars.items()}}, made.facts)


def jumping() -> Array:
    return np.asarray(np.r_[[2.3, 40.0, 11.0, 6.0], stuck(STEPS - 4)])


def diverging() -> tuple[Array, Array]:
    """A loss that grows until it overflows at step 20, and the updates that do it; one of NaN then counts as 0."""
    steps = np.arange(STEPS)
    loss = np.where(steps < 20, 2.0 * 10.0 ** np.minimum(steps, 20), np.nan)
    return loss, np.where(steps < 20, 1.3 ** np.minimum(steps, 20), 0.0)


def test_a_divergence_is_one_story_with_a_sensible_new_rate() -> None:
    loss, update = diverging()
    broken = np.where(np.arange(STEPS) < 20, 0.0, 1.0)
    spoilt = {f"{kind}__{w}.weight__nonfinite_fraction": broken for kind in ("grad", "update") for w in "02"}
    made = moved(loss, update, **spoilt, **{f"grad__{w}.weight__norm": 1.0 for w in "02"})
    first, *rest = check(made)
    assert (first.rule, first.severity) == ("lr_too_high", "critical")
    assert "step 20" in first.message
    assert "lr=0.03" in first.remedy  # updates of 33 % of the weights, from which 2 % are sensible
    assert {finding.rule for finding in first.cause_of} >= {"nan_inf"}
    assert "lr_not_applied" not in {finding.rule for finding in (first, *rest)}


def test_nan_without_large_steps_is_not_the_learning_rates_fault() -> None:
    loss = np.where(np.arange(STEPS) < 50, 1.0, np.nan)
    assert not list(lr_too_high(moved(loss, np.r_[[2.0], np.full(STEPS - 1, 0.02)])))


def test_a_rate_that_is_raised_at_once_is_named_with_the_stable_one() -> None:
    rates = np.where(np.arange(STEPS) < 50, 0.01, 0.4)
    loss = np.r_[np.geomspace(8.0, 0.1, 50), np.full(50, 3.0)]
    (finding,) = lr_too_high(moved(loss, 0.05, rate=rates))
    assert finding.step == 50
    assert "lr=0.01" in finding.remedy


def test_updates_larger_than_the_weights_with_a_loss_that_never_recovers_are_named() -> None:
    (finding,) = lr_too_high(moved(jumping(), BIG))
    assert finding.step == 0
    assert finding.sites == ("0.weight", "2.weight")
    assert "from 0.5 to" in finding.remedy


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_the_loss_changes_no_verdict(scale: float) -> None:
    assert list(lr_too_high(moved(scale * jumping(), BIG)))
    assert not list(lr_too_high(moved(scale * falling(STEPS), BIG)))


def test_large_first_updates_that_the_loss_gets_over_are_not() -> None:
    assert not list(lr_too_high(moved(falling(STEPS), BIG)))


def test_weights_that_are_replaced_at_once_are_the_cause_of_a_loss_that_never_falls() -> None:
    assert list(lr_too_high(moved(stuck(STEPS), BIG)))
    assert not list(lr_too_high(moved(stuck(STEPS), BIG / 4)))


def test_a_run_that_is_thrown_far_in_its_first_steps_is_named_even_if_it_recovers() -> None:
    thrown = np.r_[[2.3, 90.0, 30.0], falling(STEPS - 3)]
    assert list(lr_too_high(moved(thrown, BIG)))
    assert not list(lr_too_high(moved(thrown, 0.05)))


def test_a_stuck_loss_with_ordinary_updates_is_not_a_learning_rate_too_high() -> None:
    assert not list(lr_too_high(moved(stuck(STEPS), 0.05)))


def test_small_initial_weights_are_measured_by_what_they_could_be() -> None:
    assert not list(lr_too_high(moved(stuck(STEPS), 0.05, weight=0.01)))


def test_a_loss_that_fell_and_was_thrown_back_by_one_large_step_is_named_from_that_step() -> None:
    loss = np.r_[falling(60, 2.3, 0.2), [50.0, 20.0], stuck(STEPS - 62)]
    update = np.where(np.arange(STEPS) == 59, 8.0, 0.05)
    (finding,) = lr_too_high(moved(loss, update))
    assert finding.step == 59


def test_weights_carried_far_by_many_middling_steps_are_named_unless_it_learns() -> None:
    assert list(lr_too_high(moved(stuck(STEPS), 0.5)))
    assert not list(lr_too_high(moved(falling(STEPS), 0.5)))


def test_a_loss_that_becomes_infinite_after_large_steps_is_named() -> None:
    loss = np.r_[2.3, 1e5, 1e20, np.full(12, np.nan)]
    assert list(lr_too_high(moved(loss, BIG[: len(loss)])))


def test_tiny_updates_that_learn_nothing_are_named() -> None:
    (finding,) = lr_too_low(moved(stuck(STEPS), 1e-5, rate=1e-6))
    assert "from 1e-6 to" in finding.remedy


@pytest.mark.parametrize(
    ("loss", "update"),
    [
        (falling(STEPS), 1e-5),  # it learns all the same
        (stuck(STEPS), 0.01),  # it moves, and something else is wrong
        (stuck(STEPS), 0.0),  # it does not move at all
        (np.r_[2.3, 90.0, stuck(STEPS - 2)], np.r_[9.0, np.full(STEPS - 1, 1e-6)]),  # it jumped to where nothing moves
    ],
)
def test_what_only_looks_like_a_learning_rate_too_low_is_not(loss: Array, update: object) -> None:
    assert not list(lr_too_low(moved(loss, update)))


def test_a_model_that_is_better_than_guessing_already_may_take_tiny_steps() -> None:
    guess = {"data__loss__baseline": 2.3, "data__loss__value": 0.4, "data__loss__reduction": 0.0}
    assert not list(lr_too_low(moved(stuck(STEPS, 0.4), 1e-5, **guess)))
    assert list(lr_too_low(moved(stuck(STEPS, 2.3), 1e-5, **{**guess, "data__loss__value": 2.3})))


def test_a_run_that_ends_within_its_warmup_is_not_judged() -> None:
    assert not list(lr_too_low(moved(stuck(STEPS), 1e-5, rate=np.linspace(1e-6, 1e-3, STEPS))))


def test_a_rate_that_is_gone_after_a_few_steps_is_named() -> None:
    (finding,) = lr_decay_too_fast(moved(stuck(STEPS), 0.01, rate=0.1 * 0.7 ** np.arange(STEPS)))
    assert finding.step == 9


@pytest.mark.parametrize(
    ("loss", "rate"),
    [
        (stuck(STEPS), 0.05 * (1 + np.cos(np.pi * np.arange(STEPS) / STEPS))),
        (falling(STEPS), 0.1 * 0.7 ** np.arange(STEPS)),
        (stuck(STEPS), np.full(STEPS, 0.1)),
    ],
)
def test_planned_decay_or_a_job_that_is_done_is_not(loss: Array, rate: Array) -> None:
    assert not list(lr_decay_too_fast(moved(loss, 0.01, rate=rate)))


def test_gradients_without_any_movement_are_named_with_the_rate_that_is_zero() -> None:
    grads = {"grad__0.weight__norm": 1.0, "grad__2.weight__norm": 1.0}
    (finding,) = lr_not_applied(moved(stuck(STEPS), 0.0, rate=0.0, **grads))
    assert "learning rate is 0" in finding.message
    assert not list(lr_not_applied(moved(stuck(STEPS), 1e-6, rate=1e-6, **grads)))


def test_no_gradient_and_no_movement_is_another_fault() -> None:
    grads = {"grad__0.weight__norm": 0.0, "grad__2.weight__norm": 0.0}
    assert not list(lr_not_applied(moved(stuck(STEPS), 0.0, rate=0.1, **grads)))


def transformer(loss: Array, *, norm_first: bool = False, rate: Array | float = 0.01) -> Window:
    document = {**stack("Linear 16 16", lr=0.01), "optimizers": [{"type": "Adam", "groups": [{"lr": 0.01}]}]}
    for block in range(6):
        order = 10 * block + 10
        document["modules"] += [
            {
                "name": f"b.{block}.norm1",
                "type": "LayerNorm",
                "kind": "norm",
                "order": order + (0 if norm_first else 2),
            },
            {"name": f"b.{block}.attn", "type": "MultiheadAttention", "kind": "attention", "order": order + 1},
        ]
    made = window(document, loss, {"update/0.weight/norm": 0.2, "param/0.weight/norm": 4.0})
    return with_scalars(made, {"optim/lr": np.broadcast_to(rate, loss.shape)})


def test_a_deep_postnorm_transformer_that_stalls_without_warmup_is_named() -> None:
    (finding,) = missing_warmup(transformer(stuck(STEPS)))
    assert finding.step == 0


def test_prenorm_warmup_or_learning_is_fine() -> None:
    assert not list(missing_warmup(transformer(stuck(STEPS), norm_first=True)))
    assert not list(missing_warmup(transformer(falling(STEPS))))
    assert not list(missing_warmup(transformer(stuck(STEPS), rate=np.minimum(1, np.arange(STEPS) / 40) * 0.01)))
    assert postnorm_blocks(structure(transformer(stuck(STEPS), norm_first=True))) == []


def test_empty_windows_and_short_runs_say_nothing() -> None:
    for rule in (lr_too_high, lr_too_low, lr_decay_too_fast, lr_not_applied, missing_warmup):
        assert not list(rule(Window()))
        assert not list(rule(moved(jumping()[:8], BIG[:8])))
