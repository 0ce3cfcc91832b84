"""Gradients that fade over depth are named; small ones everywhere, late ones and those of nets that learn are not."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.rules.vanishing_gradients import vanishing_gradients
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 8", "Sigmoid", "Linear 8 8", "Sigmoid", "Linear 8 8", "Sigmoid", "Linear 8 3")
SITES = ("0.weight", "2.weight", "4.weight", "6.weight")


def profile(*grads: object, loss: np.ndarray) -> Window:
    series = {f"grad/{site}/norm_preclip": grad for site, grad in zip(SITES, grads, strict=True)}
    return window(MODEL, loss, {**series, **{f"param/{site}/norm": 3.0 for site in SITES}})


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e-4])
def test_gradients_that_fade_towards_the_input_are_named_at_any_scale_of_the_loss(scale: float) -> None:
    seen = profile(1e-6 * scale, 1e-4 * scale, 1e-2 * scale, scale, loss=scale * stuck(100))
    (finding,) = vanishing_gradients(seen)
    assert finding.sites[0] == "0.weight"
    assert finding.step == 0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_gradients_of_one_size_do_not_vanish_however_small(scale: float) -> None:
    assert not list(vanishing_gradients(profile(scale, scale, scale, scale, loss=scale * stuck(100))))


def test_a_signal_that_fades_forwards_makes_weak_gradients_suspicious() -> None:
    weak = profile(2e-3, 2e-3, 0.1, 1.0, loss=stuck(100))
    assert not list(vanishing_gradients(weak))
    sizes = zip(SITES, (1.0, 0.1, 1e-3, 1e-5), strict=True)
    owners = {f"act/{site.removesuffix('.weight')}/rms": size for site, size in sizes}
    spread = {f"unit/{site.removesuffix('.weight')}/batch_std": 0.9 for site in SITES}
    signal = window(MODEL, stuck(100), owners | spread).series
    (finding,) = vanishing_gradients(Window({**weak.series, **signal}, weak.scalars, weak.facts))
    assert finding.step == 0


def test_a_net_that_learns_has_no_fault() -> None:
    assert not list(vanishing_gradients(profile(1e-6, 1e-4, 1e-2, 1.0, loss=falling(100))))


def test_a_weak_side_branch_is_not_a_gradient_that_vanishes() -> None:
    """Queries and keys begin with little gradient; what passes by them reaches the layers at the input all the same."""
    model = stack(*["Linear 8 8"] * 12)
    pulls = [1e-6, 1e-6, 1.0, 1.0, 1.0, 1.0, 1e-6, 1e-6, 1.0, 1.0, 1.0, 1.0]
    series: dict[str, object] = {f"grad/{place}.weight/norm_preclip": pull for place, pull in enumerate(pulls)}
    seen = window(model, stuck(100), series | {f"param/{place}.weight/norm": 3.0 for place in range(12)})
    assert not list(vanishing_gradients(seen))


def test_exact_zeros_come_from_something_else() -> None:
    assert not list(vanishing_gradients(profile(0.0, 0.0, 0.0, 1.0, loss=stuck(100))))


def test_what_comes_late_has_another_cause() -> None:
    late = np.where(np.arange(100) > 60, 1e-7, 1.0)
    assert not list(vanishing_gradients(profile(late, late, 1.0, 1.0, loss=stuck(100))))


def test_an_empty_window_says_nothing() -> None:
    assert not list(vanishing_gradients(Window()))
