"""Sigmoid and tanh units are saturated: their inputs are so large that the function is flat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Lasting, lasting
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Module, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent, since
from sonde.schema.window import Window

SATURATED: Final = 0.5
"""Fraction of inputs of a sigmoid or tanh with |z| > 5; 0 to 1 % of healthy runs have such a layer."""
STUCK: Final = 0.15
"""Final loss as a fraction of its start; gates that open and close in a network that learns are not a fault."""


@rule(
    is_measured=True,
    severity="warning",
    causes=(
        "vanishing_gradients",
        "underfitting",
        "lr_too_low",
        "rank_collapse",
        "bottleneck_layer",
        "adam_epsilon_dominates",
    ),
    references=("Glorot & Bengio 2010", "DeepDiagnosis, Wardat et al. 2022"),
)
def saturated_activations(window: Window) -> Iterator[Found]:
    """More than half of the inputs of a sigmoid or tanh are where it is flat."""
    loss = learned(window)
    if loss is None:
        return
    flat = [layer for layer in lasting(window, "unit/*/saturated", SATURATED) if not _is_output(window, layer.site)]
    if not flat:
        return
    is_fault = loss.left > STUCK or loss.has_diverged
    worst = max(flat, key=lambda layer: layer.level)
    yield _finding(window, flat, worst, None if is_fault else "info")


def _is_output(window: Window, site: str) -> bool:
    """Whether it is the last activation, which is saturated in a confident classifier; no layer learns after it."""
    model = structure(window)
    own = model.module(site)
    if own is None:
        return False  # a function, called inside a module that is listed with its parameters
    later = [module for module in model.in_order if module.order > own.order]
    return own.is_leaf and bool(model.modules) and not any(_learns(module) for module in later)


def _learns(module: Module) -> bool:
    return module.kind in ("linear", "conv", "rnn", "attention")


def _finding(window: Window, flat: list[Lasting], worst: Lasting, severity: str | None) -> Found:
    first = min(flat, key=lambda layer: layer.since)
    module = structure(window).module(worst.site)
    kind = f" ({module.type})" if module is not None and module.is_leaf else ""
    return Found(
        f"{percent(worst.level)} of the inputs of {worst.site}{kind} have been beyond ±5, where it is flat, "
        f"{since(first.since)}.",
        step=first.since,
        confidence=0.8,
        sites=[layer.site for layer in sorted(flat, key=lambda layer: -layer.level)],
        evidence=[
            Evidence(f"unit/{worst.site}/saturated", worst.level, "below 0.1", first.since, "saturated fraction")
        ],
        remedy=(
            "Normalise the inputs, initialise with `nn.init.xavier_normal_(layer.weight)`, or put `nn.LayerNorm` "
            "before the activation. If the saturation began later in the run, lower the learning rate."
        ),
        severity=severity,
    )
