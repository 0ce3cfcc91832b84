"""Weights drawn too wide or too small at the start: outputs far from what guessing would give, or no signal at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.depth import path
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.measures.signal import fading
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

WIDE: Final = 3.0
"""Gain: root mean square of a weight times the root of its fan-in. 0.58 in torch, 1 Xavier, 1.41 He."""
SMALL: Final = 0.3
FAR: Final = 3.0
"""Loss at the first step over that of guessing."""
FADED: Final = 0.02
HARMED: Final = 0.3
"""Share of the loss that is left: whoever learns all the same started well enough."""


@rule(
    is_measured=True,
    severity="warning",
    needs=("param/*/rms", "act/*/rms"),
    causes=(
        # Gradients that vanish and units that saturate are the same fault seen from the other side: they stay named.
        "nan_inf", "loss_spikes", "dead_relu", "adam_epsilon_dominates",
        "output_logit_growth", "underfitting", "rank_collapse", "attention_logit_growth", "attention_entropy_collapse",
        "clip_too_tight", "lr_too_low", "bottleneck_layer", "loss_oscillation",
    ),
    references=("Glorot & Bengio 2010", "He et al. 2015", "TheDeepChecker, Ben Braiek & Khomh 2022"),
)  # fmt: skip
def init_scale(window: Window) -> Iterator[Found]:
    """Initial weights are far too wide or far too small."""
    loss = learned(window)
    weights = [weight for weight in path(window) if weight.fan_in and not _feeds_norm(window, weight)]
    gains = {weight.name: gain for weight in weights if (gain := _gain(window, weight)) > 0}
    if loss is None or not gains:
        return
    wide = [name for name, gain in gains.items() if gain > WIDE]
    small = [name for name, gain in gains.items() if gain < SMALL]
    if wide and loss.first > FAR * loss.guessing and (loss.left > HARMED or loss.has_diverged):
        yield _wide(wide, gains, loss)
    elif len(small) >= max(2, len(gains) // 2) and loss.left > 0.7 and _has_no_norm(window) and fading(window) < FADED:
        yield _small(window, small, gains)


def _gain(window: Window, weight: Parameter) -> float:
    values = window.get(f"param/{weight.name}/rms")[1]
    return float(values[0]) * weight.fan_in**0.5 if len(values) and np.isfinite(values[0]) else float("nan")


def _feeds_norm(window: Window, weight: Parameter) -> bool:
    """A norm right after a layer takes the scale of its weights away."""
    modules = [module for module in structure(window).in_order if module.is_leaf]
    place = next((index for index, module in enumerate(modules) if module.name == weight.owner), -1)
    return 0 <= place < len(modules) - 1 and modules[place + 1].kind == "norm"


def _has_no_norm(window: Window) -> bool:
    return not any(module.kind == "norm" for module in structure(window).in_order)


def _wide(wide: list[str], gains: dict[str, float], loss: Learned) -> Found:
    worst = max(wide, key=lambda name: gains[name])
    far = loss.first / loss.guessing
    return Found(
        f"weights start too wide: those of {worst} are {gains[worst] / 2**0.5:.1f} times as large as He initialisation "
        f"makes them, and the first loss is {far:.3g} times that of guessing",
        step=int(loss.steps[0]),
        confidence=0.92 if far > 10 else 0.85,  # the first loss was there before any update
        sites=sorted(wide, key=lambda name: -gains[name]),
        evidence=[
            Evidence(f"param/{worst}/rms", gains[worst], "0.5 to 2", meaning="root mean square times root of fan-in"),
            Evidence(loss.name, far, "about 1", meaning="first loss over that of guessing"),
        ],
        remedy=_remedy(worst),
    )


def _small(window: Window, small: list[str], gains: dict[str, float]) -> Found:
    worst = min(small, key=lambda name: gains[name])
    left = fading(window)
    return Found(
        f"weights start too small: those of {worst} are {gains[worst] / 2**0.5:.2g} of what He initialisation "
        f"makes them, and {left:.0e} of the signal gets through",
        step=0,
        confidence=0.85,
        sites=sorted(small, key=lambda name: gains[name]),
        evidence=[
            Evidence(f"param/{worst}/rms", gains[worst], "0.5 to 2", meaning="root mean square times root of fan-in"),
            Evidence(f"act/{worst}/rms", left, "above 0.1", meaning="signal in the later layers over the earlier"),
        ],
        remedy=_remedy(worst),
    )


def _remedy(site: str) -> str:
    return (
        f"nn.init.kaiming_normal_(model.{site}) for ReLU, nn.init.xavier_normal_ for tanh and sigmoid, "
        "N(0, 0.02) for language models; or torch's default."
    )
