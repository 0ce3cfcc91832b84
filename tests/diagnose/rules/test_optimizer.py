"""Gradients that are kept, flipped, clipped away or smaller than eps are reported; what only looks similar is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sonde.diagnose.rules.adam_epsilon_dominates import adam_epsilon_dominates
from sonde.diagnose.rules.clip_too_tight import clip_too_tight
from sonde.diagnose.rules.decay_on_norms import decay_on_norms
from sonde.diagnose.rules.flipped_gradient import flipped_gradient
from sonde.diagnose.rules.gradient_noise import gradient_noise, noise_scale
from sonde.diagnose.rules.missing_zero_grad import missing_zero_grad
from sonde.diagnose.rules.over_regularisation import over_regularisation
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

STEPS = 100
NET = stack("Linear 16 16", "ReLU", "Linear 16 4")
MOVED = {f"update/{w}.weight/norm": 0.02 for w in "02"} | {f"param/{w}.weight/norm": 4.0 for w in "02"}


def adam(**group: Any) -> dict[str, Any]:
    return {**NET, "optimizers": [{"type": "Adam", "groups": [{"lr": 1e-3, "betas": [0.9, 0.999], **group}]}]}


def kept(norm: Array, *, cosine: float = 0.99, is_kept: float = 1.0) -> Window:
    seen = {"model/model/grad_cosine": cosine, "model/model/grad_kept": is_kept, "grad/0.weight/norm_preclip": norm}
    return window(NET, stuck(STEPS), seen)


SUMMED = np.minimum(np.arange(1.0, STEPS + 1), 20.0)


def test_gradients_that_pile_up_are_named() -> None:
    (finding,) = missing_zero_grad(kept(SUMMED))
    assert "zero_grad" in finding.remedy


def test_full_batches_fresh_buffers_and_different_batches_are_not() -> None:
    assert not list(missing_zero_grad(kept(np.linspace(1.0, 0.5, STEPS))))
    assert not list(missing_zero_grad(kept(SUMMED, is_kept=0.0)))
    assert not list(missing_zero_grad(kept(SUMMED, cosine=0.3)))


CLIMB = np.geomspace(2.3, 300.0, STEPS)


def climbing(loss: Array, cosine: float, dot: float) -> Window:
    turned = {"update/0.weight/grad_cosine": cosine, "update/0.weight/grad_update_dot": dot}
    return window(NET, loss, {**MOVED, **turned})


def test_updates_along_the_gradient_are_named() -> None:
    (finding,) = flipped_gradient(climbing(CLIMB, 1.0, 0.1))
    assert finding.confidence > 0.9


def test_a_loss_that_climbs_where_each_step_promises_a_fall_is_named() -> None:
    assert list(flipped_gradient(climbing(CLIMB, -1.0, -0.1)))


@pytest.mark.parametrize("loss", [falling(STEPS), stuck(STEPS), np.r_[falling(50), np.geomspace(0.1, 300.0, 50)]])
def test_a_loss_that_fell_before_it_rose_or_never_rose_is_not(loss: Array) -> None:
    assert not list(flipped_gradient(climbing(loss, -1.0, -0.1)))


@pytest.mark.parametrize(("rise", "factor"), [(100.0, -1.0), (3.0, -1.0), (100.0, 1.0), (100.0, -2.0)])
def test_a_loss_of_minus_what_its_function_returned_is_named_if_it_rises_without_bound(
    rise: float, factor: float
) -> None:
    returned = np.geomspace(2.3, 2.3 * rise, STEPS)
    found = list(flipped_gradient(window(NET, factor * returned, {**MOVED, "data/loss/value": returned})))
    assert bool(found) == ((rise, factor) == (100.0, -1.0))


def shrinking(loss: Array, rate: float, decay: float = 0.3) -> Window:
    norms = {f"param/{w}.weight/norm": 4.0 * rate ** np.arange(STEPS) for w in "02"}
    made = window(adam(weight_decay=decay), loss, norms)
    return Window(made.series, {**made.scalars, "optim/lr": (np.arange(STEPS), np.full(STEPS, 0.1))}, made.facts)


def test_weights_that_decay_to_nothing_are_named_with_a_smaller_decay() -> None:
    (finding,) = over_regularisation(shrinking(stuck(STEPS), 0.97))
    assert "weight decay from 0.3" in finding.remedy


@pytest.mark.parametrize(("gradient", "kind", "is_named"), [(0.01, "Adam", 1), (9.0, "Adam", 0), (0.01, "AdamW", 0)])
def test_decay_that_outweighs_the_gradients_explains_the_shrinking(gradient: float, kind: str, is_named: int) -> None:
    made = shrinking(stuck(STEPS), 0.97, decay=0.05)
    made.facts["model"]["optimizers"][0]["type"] = kind
    gradients = window(NET, stuck(STEPS), {f"grad/{w}.weight/norm": gradient for w in "02"}).series
    assert len(list(over_regularisation(Window({**made.series, **gradients}, made.scalars, made.facts)))) == is_named


def test_weights_that_shrink_a_little_or_while_learning_are_not() -> None:
    assert not list(over_regularisation(shrinking(stuck(STEPS), 0.999)))
    assert not list(over_regularisation(shrinking(falling(STEPS), 0.97)))


def test_weights_that_shrink_without_any_decay_are_where_they_should_be() -> None:
    assert not list(over_regularisation(shrinking(stuck(STEPS), 0.97, decay=0.0)))


def test_the_decay_is_that_of_the_group_which_the_weights_are_in() -> None:
    made = shrinking(stuck(STEPS), 0.97, decay=0.0)
    (first,) = adam(weight_decay=0.0)["optimizers"]
    first["groups"].append({"lr": 0.1, "weight_decay": 0.3})
    parameters = [{**parameter, "optimizer": 0, "group": 1} for parameter in NET["parameters"]]
    document = {**NET, "parameters": parameters, "optimizers": [first]}
    rates = {**made.scalars, "optim/group1/lr": (np.arange(STEPS), np.full(STEPS, 0.1))}
    (finding,) = over_regularisation(Window(made.series, rates, {"model": document}))
    assert "weight decay from 0.3" in finding.remedy
    frozen = {**rates, "optim/group1/lr": (np.arange(STEPS), np.zeros(STEPS))}
    assert not list(over_regularisation(Window(made.series, frozen, {"model": document})))


def clipped(loss: Array, factor: float, update: float) -> Window:
    names = {
        "grad/0.weight/clip_factor": factor,
        **MOVED,
        "update/0.weight/norm": update,
        "update/2.weight/norm": update,
    }
    return window(NET, loss, names)


def test_a_clip_that_leaves_nothing_is_named() -> None:
    assert list(clip_too_tight(clipped(stuck(STEPS), 1e-3, 1e-5)))


@pytest.mark.parametrize(
    ("loss", "factor", "update"),
    [(stuck(STEPS), 0.3, 1e-5), (stuck(STEPS), 1e-3, 0.05), (falling(STEPS), 1e-3, 1e-5)],
)
def test_a_usual_clip_or_one_that_does_no_harm_is_not(loss: Array, factor: float, update: float) -> None:
    assert not list(clip_too_tight(clipped(loss, factor, update)))


def second_moments(eps: float, size: float, loss: Array) -> Window:
    corrected = size**2 * (1 - 0.999 ** (np.arange(STEPS) + 1.0))
    return window(adam(eps=eps), loss, {f"optim/{w}.weight.exp_avg_sq/abs_mean": corrected for w in "02"})


def test_an_eps_above_the_gradients_is_named_where_nothing_is_learned() -> None:
    (finding,) = adam_epsilon_dominates(second_moments(1.0, 1e-3, stuck(STEPS)))
    assert finding.severity == "warning"
    (finding,) = adam_epsilon_dominates(second_moments(1.0, 1e-3, falling(STEPS)))
    assert finding.severity == "info"


def test_tiny_gradients_with_a_tinier_eps_are_fine() -> None:
    assert not list(adam_epsilon_dominates(second_moments(1e-12, 1e-7, stuck(STEPS))))


def test_the_two_eps_of_adafactor_are_not_those_of_adam() -> None:
    assert not list(adam_epsilon_dominates(second_moments([1e-30, 1e-3], 1e-3, stuck(STEPS))))  # type: ignore[arg-type]


def test_decay_of_norms_is_a_remark() -> None:
    norm = {"name": "1.weight", "shape": [16], "module_type": "LayerNorm", "group": 0, "owner": "1"}
    document = adam(weight_decay=0.1)
    document = {**document, "parameters": [*document["parameters"], norm]}
    (finding,) = decay_on_norms(window(document, falling(STEPS), {}))
    assert finding.severity == "info"
    assert not list(decay_on_norms(window({**document, **adam(weight_decay=0.0)}, falling(STEPS), {})))


def test_norms_of_a_second_optimizer_have_its_decay() -> None:
    norm = {"name": "1.weight", "shape": [16], "module_type": "LayerNorm", "optimizer": 1, "group": 0, "owner": "1"}
    muon = {"number": 0, "type": "Muon", "groups": [{"lr": 0.02, "weight_decay": 0.1}]}
    adamw = {"number": 1, "type": "AdamW", "groups": [{"lr": 1e-3, "weight_decay": 0.0}]}
    document = {**NET, "parameters": [*NET["parameters"], norm], "optimizers": [muon, adamw]}
    assert not list(decay_on_norms(window(document, falling(STEPS), {})))
    adamw["groups"][0]["weight_decay"] = 0.1
    assert list(decay_on_norms(window(document, falling(STEPS), {})))


def noisy(noise_share: float, batch: float = 64.0, *, is_learned: bool = False) -> Window:
    """|g|^2 = 1, of which a fraction is noise, and the moments that Adam would have."""
    shrink = (1 - 0.9) / (1 + 0.9)
    moment = (1 - noise_share) + noise_share * shrink
    seen = {"grad/0.weight/sumsq": 1.0, "optim/0.weight.exp_avg/sumsq": moment, "data/input/size": batch}
    return window(adam(), falling(STEPS) if is_learned else stuck(STEPS), seen)


def test_the_noise_scale_is_noise_over_signal_times_the_batch() -> None:
    assert noise_scale(noisy(0.75), 64.0) == pytest.approx(64 * 3.0)
    assert not list(gradient_noise(noisy(0.75)))
    (finding,) = gradient_noise(noisy(0.99))
    assert "far above" in finding.message
    assert not list(gradient_noise(noisy(0.99, is_learned=True)))  # near its floor, any gradient is mostly noise


def test_without_momentum_the_noise_scale_is_not_known() -> None:
    seen = {"grad/0.weight/sumsq": 1.0, "optim/0.weight.exp_avg/sumsq": 1.0, "data/input/size": 64.0}
    assert noise_scale(window(adam(betas=[0.0, 0.9]), falling(STEPS), seen), 64.0) is None


def test_empty_windows_say_nothing() -> None:
    for rule in (
        *(missing_zero_grad, flipped_gradient, over_regularisation, clip_too_tight, adam_epsilon_dominates),
        *(decay_on_norms, gradient_noise),
    ):
        assert not list(rule(Window()))
