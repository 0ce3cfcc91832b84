"""Sigmoids and tanhs driven to their ends, where they are flat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Lasting, lasting
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Module, structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

SATURATED: Final = 0.5
"""Share of |z| > 5 at a sigmoid's or tanh's input; 0 to 1 % of healthy runs have a layer beyond it."""
STUCK: Final = 0.15
"""Share of the loss that is left; gates that open and shut in a net that learns are no fault."""


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
    """More than half of the inputs of a sigmoid or tanh lie where it is flat."""
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
    """The last activation of a classifier is at its ends when it is sure: nothing that learns comes after it."""
    model = structure(window)
    own = model.module(site)
    if own is None:
        return False  # a function: it is called inside a module that is listed with its parameters
    later = [module for module in model.in_order if module.order > own.order]
    return own.is_leaf and bool(model.modules) and not any(_learns(module) for module in later)


def _learns(module: Module) -> bool:
    return module.kind in ("linear", "conv", "rnn", "attention")


def _finding(window: Window, flat: list[Lasting], worst: Lasting, severity: str | None) -> Found:
    first = min(flat, key=lambda layer: layer.since)
    module = structure(window).module(worst.site)
    kind = f" ({module.type})" if module is not None and module.is_leaf else ""
    since = f"since step {first.since}" if first.since else "from the start"
    return Found(
        f"{worst.level:.0%} of what reaches {worst.site}{kind} lies beyond ±5, where it is flat, {since}",
        step=first.since,
        confidence=0.8,
        sites=[layer.site for layer in sorted(flat, key=lambda layer: -layer.level)],
        evidence=[Evidence(f"unit/{worst.site}/saturated", worst.level, "below 0.1", first.since)],
        remedy=(
            "Normalise the inputs, initialise with nn.init.xavier_normal_(layer.weight), "
            "or put nn.LayerNorm in front of the activation; a lower learning rate if it began later."
        ),
        severity=severity,
    )
