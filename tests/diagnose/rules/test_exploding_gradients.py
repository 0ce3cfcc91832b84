"""Growth against the run's own start is named, whatever the scale; a single bad batch and a large loss are not."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.rules.exploding_gradients import exploding_gradients
from sonde.schema.window import Window
from windows import stack, stuck, window

MODEL = stack("Linear 8 8", "ReLU", "Linear 8 8", "ReLU", "Linear 8 3")
SITES = ("0.weight", "2.weight", "4.weight")


def seen(total: object, **other: object) -> Window:
    series: dict[str, object] = {f"grad/{site}/norm_preclip": total for site in SITES}
    series |= {f"param/{site}/norm": 3.0 for site in SITES}
    return window(MODEL, stuck(50), series | {key.replace("__", "/"): value for key, value in other.items()})


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_gradients_that_grow_and_stay_large_have_exploded(scale: float) -> None:
    (finding,) = exploding_gradients(seen(scale * np.geomspace(1, 1e8, 50)))
    assert 0 < finding.step < 40


def test_growing_until_values_are_nonfinite_is_an_explosion() -> None:
    norms = np.concatenate([np.geomspace(1, 1e5, 10), np.full(40, np.nan)])
    (finding,) = exploding_gradients(seen(norms))
    assert "end as NaN or infinity" in finding.message


def test_a_single_bad_batch_is_not_an_explosion() -> None:
    norms = np.ones(50)
    norms[20] = 1e6
    assert not list(exploding_gradients(seen(norms)))


def test_large_gradients_of_a_large_loss_are_none() -> None:
    assert not list(exploding_gradients(seen(1e6)))


def test_a_first_layer_far_steeper_than_the_last_is_named() -> None:
    series: dict[str, object] = {
        "grad/0.weight/norm_preclip": 1e5,
        "grad/2.weight/norm_preclip": 1e2,
        "grad/4.weight/norm_preclip": 1,
    }
    steep = window(MODEL, stuck(50), series | {f"param/{site}/norm": 3.0 for site in SITES})
    (finding,) = exploding_gradients(steep)
    assert finding.sites == ("0.weight",)


def test_rates_of_decay_are_not_the_last_layer() -> None:
    """A matrix that belongs to no layer and is multiplied with nothing, such as the decay rates of a state space."""
    decay = {"name": "mixer.A_log", "shape": [8, 4], "owner": "mixer", "module_type": "Mixer"}
    model = {
        **MODEL,
        "modules": [*MODEL["modules"], {"name": "mixer", "type": "Mixer", "kind": "container", "order": 9}],
        "parameters": [*MODEL["parameters"], decay],
    }
    series = {f"grad/{site}/norm_preclip": 1.0 for site in SITES} | {"grad/mixer.A_log/norm_preclip": 1e-6}
    norms = {f"param/{site}/norm": 3.0 for site in (*SITES, "mixer.A_log")}
    assert not list(exploding_gradients(window(model, stuck(50), series | norms)))


def forward(*largest: float) -> Window:
    loss = np.concatenate([[2.0], np.full(20, np.nan)])
    series = {f"act/{place}/max_abs": size for place, size in enumerate(largest)}
    return window(stack("Linear 8 8", "Exp", "Linear 8 8", "Exp", "Linear 8 3"), loss, series)


def test_outputs_that_grow_from_layer_to_layer_until_they_are_no_numbers_explode() -> None:
    (finding,) = exploding_gradients(forward(2.0, 7.0, 9.0, 1e4, 1e12))
    assert finding.sites == ("4",)


def test_a_division_by_zero_makes_one_jump_and_not_an_explosion() -> None:
    assert not list(exploding_gradients(forward(2.0, 7.0, 9.0, 1e12, 2e12)))


def test_an_empty_window_says_nothing() -> None:
    assert not list(exploding_gradients(Window()))
