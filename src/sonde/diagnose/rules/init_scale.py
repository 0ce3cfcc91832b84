"""Initial weights are too wide or too small: the first outputs are far off, or no signal gets through."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.depth import path
from sonde.diagnose.measures.loss import Learned, learned, loss_name
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.measures.readings import nearest
from sonde.diagnose.measures.signal import early, fading
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import attribute, number, percent
from sonde.schema.window import Window

WIDE: Final = 3.0
"""Gain: rms of a weight times the root of its fan-in. 0.58 for torch's default, 1 for Xavier, 1.41 for He."""
SMALL: Final = 0.3
FAR: Final = 3.0
"""First loss divided by that of a constant prediction."""
FADED: Final = 0.02
SATURATED: Final = 0.25
"""Fraction of the inputs of a sigmoid or tanh that are beyond ±5 from the start; nearly 0 with usual weights."""
HELD_BACK: Final = 0.15
"""Final loss as a fraction of its start; below it, saturated units do not matter."""
FLOODED: Final = 10.0
"""Gain of most layers that explains values that are non-finite in the first step."""
HARMED: Final = 0.3
"""Final loss as a fraction of its start; below it, the model learned despite its initialisation."""


@rule(
    is_measured=True,
    severity="warning",
    needs=("param/*/rms", "act/*/rms"),
    causes=(
        # Vanishing gradients and saturated units are the same fault seen from the other side: they are still reported.
        "nan_inf", "lr_too_high", "loss_spikes", "dead_relu", "adam_epsilon_dominates",
        "output_logit_growth", "underfitting", "rank_collapse", "attention_logit_growth", "attention_entropy_collapse",
        "clip_too_tight", "lr_too_low", "bottleneck_layer", "loss_oscillation", "rnn_vanishing_temporal",
    ),
    references=("Glorot & Bengio 2010", "He et al. 2015", "TheDeepChecker, Ben Braiek & Khomh 2022"),
)  # fmt: skip
def init_scale(window: Window) -> Iterator[Found]:
    """Initial weights are far too wide or far too small."""
    loss = learned(window)
    weights = [weight for weight in path(window) if weight.fan_in and not _feeds_norm(window, weight)]
    gains = {weight.name: gain for weight in weights if (gain := _gain(window, weight)) > 0}
    wide = [name for name, gain in gains.items() if gain > WIDE]
    if loss is None or not gains:
        if 2 * sum(gains[name] > FLOODED for name in wide) > len(gains) and _starts_nonfinite(window):
            yield _flooded(window, wide, gains)
        return
    small = [name for name, gain in gains.items() if gain < SMALL]
    if wide and loss.first > FAR * loss.guessing and (loss.left > HARMED or loss.has_diverged):
        yield _wide(wide, gains, loss)
    elif (saturated := _saturated(window, wide)) and (loss.left > HELD_BACK or loss.has_diverged):
        yield _too_wide_for(window, saturated, gains)
    elif len(small) >= max(2, len(gains) // 2) and loss.left > 0.7 and _has_no_norm(window) and fading(window) < FADED:
        yield _small(window, small, gains)


def _gain(window: Window, weight: Parameter) -> float:
    values = window.get(f"param/{weight.name}/rms")[1]
    return float(values[0]) * weight.fan_in**0.5 if len(values) and np.isfinite(values[0]) else float("nan")


def _feeds_norm(window: Window, weight: Parameter) -> bool:
    """Whether a norm follows the layer directly, which cancels the scale of its weights."""
    modules = [module for module in structure(window).in_order if module.is_leaf]
    place = next((index for index, module in enumerate(modules) if module.name == weight.owner), -1)
    return 0 <= place < len(modules) - 1 and modules[place + 1].kind == "norm"


def _has_no_norm(window: Window) -> bool:
    return not any(module.kind == "norm" for module in structure(window).in_order)


def _wide(wide: list[str], gains: dict[str, float], loss: Learned) -> Found:
    worst = max(wide, key=lambda name: gains[name])
    far = loss.first / loss.guessing
    return Found(
        f"The initial weights are too wide: those of {worst} are {number(gains[worst] / 2**0.5)} times as large as "
        f"with He initialisation, and the first loss is {number(far, 3)} times that of a constant prediction.",
        step=int(loss.steps[0]),
        confidence=0.92 if far > 10 else 0.85,  # the first loss was measured before any update
        sites=sorted(wide, key=lambda name: -gains[name]),
        evidence=[
            Evidence(f"param/{worst}/rms", gains[worst], "0.5 to 2", meaning="rms of the weights * sqrt(fan-in)"),
            Evidence(loss.name, far, "about 1", meaning="first loss / a constant prediction's"),
        ],
        remedy=_remedy(worst),
    )


def _starts_nonfinite(window: Window) -> bool:
    values = window.get(loss_name(window) or "")[1]
    return len(values) > 0 and not np.isfinite(values[0])


def _flooded(window: Window, wide: list[str], gains: dict[str, float]) -> Found:
    worst = max(wide, key=lambda name: gains[name])
    return Found(
        f"The initial weights are too wide: those of {worst} are {number(gains[worst] / 2**0.5)} times as large as "
        "with He initialisation, and the first loss is NaN or infinite.",
        step=int(window.get(loss_name(window) or "")[0][0]),
        confidence=0.85,
        severity="critical",
        sites=sorted(wide, key=lambda name: -gains[name]),
        evidence=[
            Evidence(f"param/{worst}/rms", gains[worst], "0.5 to 2", meaning="rms of the weights * sqrt(fan-in)")
        ],
        remedy=_remedy(worst),
    )


def _saturated(window: Window, wide: list[str]) -> dict[str, str]:
    """Too wide weights, each with the activation after it that they saturate from the start. The first loss does not
    show them: a bounded activation hides their size."""
    modules = [module for module in structure(window).in_order if module.is_leaf]
    after = {module.name: follower.name for module, follower in pairwise(modules)}
    owners = {weight.name: weight.owner for weight in path(window)}
    found = {name: after.get(owners[name], "") for name in wide}
    return {name: site for name, site in found.items() if early(window, f"unit/{site}/saturated") > SATURATED}


def _too_wide_for(window: Window, saturated: dict[str, str], gains: dict[str, float]) -> Found:
    worst = max(saturated, key=lambda name: gains[name])
    series = f"unit/{saturated[worst]}/saturated"
    level = early(window, series)
    return Found(
        f"The initial weights are too wide: those of {worst} are {number(gains[worst] / 2**0.5)} times as large as "
        f"with He initialisation, and {percent(level)} of the inputs of {saturated[worst]} are where it is flat.",
        step=0,
        confidence=0.8,
        sites=sorted(saturated, key=lambda name: -gains[name]),
        evidence=[
            Evidence(f"param/{worst}/rms", gains[worst], "0.5 to 2", meaning="rms of the weights * sqrt(fan-in)"),
            nearest(window, series, level, "below 0.1", "saturated fraction"),
        ],
        remedy=_remedy(worst),
    )


def _small(window: Window, small: list[str], gains: dict[str, float]) -> Found:
    worst = min(small, key=lambda name: gains[name])
    left = fading(window)
    return Found(
        f"The initial weights are too small: those of {worst} are {percent(gains[worst] / 2**0.5)} of the size that He "
        f"initialisation gives, and only {percent(left)} of the signal gets through.",
        step=0,
        confidence=0.85,
        sites=sorted(small, key=lambda name: gains[name]),
        evidence=[
            Evidence(f"param/{worst}/rms", gains[worst], "0.5 to 2", meaning="rms of the weights * sqrt(fan-in)"),
            Evidence(f"act/{worst}/rms", left, "above 0.1", meaning="signal in the later layers / the earlier"),
        ],
        remedy=_remedy(worst),
    )


def _remedy(site: str) -> str:
    return (
        f"Initialise with `nn.init.kaiming_normal_({attribute(site)})` for ReLU, `nn.init.xavier_normal_` for tanh and "
        "sigmoid, or a standard deviation of 0.02 for language models, or keep torch's default."
    )
