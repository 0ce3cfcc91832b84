"""Inputs have the wrong scale: features in different units, or values so large that the first layer explodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, seen
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

LARGE: Final = 20.0
"""Root mean square of the inputs above which the first layer is far from what it was initialised for."""
TINY: Final = 0.01
UNITS: Final = 50.0
"""Ratio of the largest to the smallest feature, in spread and in magnitude, that shows different units."""


@rule(
    needs=("act/*/rms", "param/*/rms"),
    causes=(
        "lr_too_high", "exploding_gradients", "dead_relu", "loss_spikes", "loss_oscillation", "saturated_activations",
        "nan_inf", "underfitting", "vanishing_gradients", "init_scale", "lr_too_low", "output_logit_growth",
        "rank_collapse", "constant_output", "missing_warmup", "symmetric_init", "bottleneck_layer", "residual_decay",
    ),
    references=("LeCun et al. 1998, Efficient BackProp", "Schoop et al. 2021, UMLAUT"),
)  # fmt: skip
def unnormalised_inputs(window: Window) -> Iterator[Found]:
    """The inputs have a scale that the first layer was not initialised for."""
    std, mean = seen(window, "data/input/std"), seen(window, "data/input/mean")
    if len(std) < MIN_SEEN or seen(window, "data/input/is_token").typical != 0.0 or _is_normalised_inside(window):
        return
    rms = float(np.hypot(std.typical, mean.typical))
    shrunk = _shrinking(window, rms)
    spread = seen(window, "data/input/feature_std_ratio").typical
    reach = seen(window, "data/input/feature_abs_max_ratio").typical
    largest = seen(window, "data/input/abs_max").typical
    state = learned(window)
    is_stuck = state is None or state.has_diverged or state.left > 0.5
    is_large = rms * shrunk > LARGE
    is_tiny = 0 < rms < TINY and is_stuck
    is_mixed = spread > UNITS and reach > UNITS and (largest * shrunk > LARGE or is_stuck)
    what = []
    if is_mixed:
        what.append(f"features differ in scale by a factor of {_round(spread)}")
    if is_large or is_tiny:
        what.append(f"values have a root mean square of {_round(rms)} and reach {_round(largest)}")
    if not what:
        return
    # If the optimizer copes with it, it is only info.
    is_learned = state is not None and state.left < 0.15
    yield Found(
        f"The inputs are not normalised: {' and '.join(what)}.",
        step=int(std.steps[0]),
        confidence=0.85 if is_large else 0.75,
        remedy="Normalise them: `x = (x - train_x.mean(0)) / train_x.std(0)`, or put a batch norm before the first "
        "layer.",
        sites=tuple(p.name for p in structure(window).matrices[:1]),
        evidence=(
            Evidence("data/input/std", rms, "about 1", meaning="root mean square of the inputs"),
            Evidence("data/input/feature_std_ratio", spread, "below 10", meaning="largest / smallest feature spread"),
        ),
        severity="info" if is_learned else None,
    )


def _is_normalised_inside(window: Window) -> bool:
    """Whether a norm layer comes before the first weights."""
    for module in structure(window).in_order:
        if module.kind == "norm":
            return True
        if module.kind in ("linear", "conv", "rnn", "attention"):
            return False
    return False


def _shrinking(window: Window, rms: float) -> float:
    """The factor by which the model scales inputs down before the first layer: some models divide by 255 themselves.

    A layer's output is about the rms of its weights times that of its input, times the root of the number of inputs.
    """
    first = next((p for p in structure(window).matrices if p.fan_in), None)
    if first is None or not rms > 0:
        return 1.0
    out, weight = window.get(f"act/{first.owner}/rms")[1], window.get(f"param/{first.name}/rms")[1]
    if not len(out) or not len(weight) or not weight[0] > 0 or not np.isfinite(out[0]):
        return 1.0
    arrived = float(out[0]) / (float(weight[0]) * float(np.sqrt(first.fan_in)))
    return min(1.0, 4 * arrived / rms)


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
