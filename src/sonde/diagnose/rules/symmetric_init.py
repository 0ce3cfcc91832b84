"""The units of a layer start with the same weights and stay the same: the layer acts as a single unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.depth import path
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import attribute, listed
from sonde.schema.window import Window

SAME: Final = 1e-3
"""Largest deviation of a row from the mean row, relative to the rms of the weights. Random rows: 2 to 5."""
PARTED_BY: Final = 10
"""Number of steps after which rows that start the same on purpose (a head, a zero residual branch) differ."""


PARTED: Final = 1.0
"""Deviation above which rows count as different."""

PARTED_TOO_LATE: Final = 0.3
"""Final loss as a fraction of its start."""


@rule(
    severity="critical",
    needs=("param/*/norm",),
    causes=(
        "vanishing_gradients", "underfitting", "dead_relu", "init_scale", "lr_too_low", "rank_collapse",
        "bottleneck_layer", "saturated_activations", "frozen_layers", "detached_graph", "constant_output",
        "adam_epsilon_dominates",
    ),
    references=("Goodfellow et al. 2016, Deep Learning, 8.4", "NeuraLint, Nikanjam et al. 2021"),
)  # fmt: skip
def symmetric_init(window: Window) -> Iterator[Found]:
    """All units of a layer start the same and get the same gradient, so they never become different."""
    weights = [weight for weight in path(window) if weight.in_optimizer]
    same = [weight for weight in weights[:-1] if weight.shape[0] > 1 and _stays_same(window, weight)]
    same = same or _start_same(window, weights)
    if not same:
        if zero := _start_at_zero(window, weights):
            yield _at_zero(window, zero)
        return
    site = same[0].name
    spread = float(window.get(f"unit/{site}/row_spread")[1][-1])
    zeros = all(_is_zero(window, weight) for weight in same)
    names = listed([weight.name for weight in same])
    units = f"All {same[0].shape[0]:,} units" if len(same) == 1 else "All units"
    layer = "the layer acts as a single unit" if len(same) == 1 else "each layer acts as a single unit"
    yield Found(
        f"{units} of {names} start with the same weights{' (zeros)' if zeros else ''} and stay the same: {layer}.",
        step=int(window.get(f"unit/{site}/row_spread")[0][0]),
        confidence=0.95,
        sites=[weight.name for weight in same],
        evidence=[Evidence(f"unit/{site}/row_spread", spread, "above 1", meaning="deviation of units from their mean")],
        remedy="Initialise the weights at random, so that units differ: "
        f"`nn.init.kaiming_normal_({attribute(same[0].owner)}.weight)`.",
    )


def _stays_same(window: Window, weight: Parameter) -> bool:
    steps, spread = window.get(f"unit/{weight.name}/row_spread")
    known = np.isfinite(spread)
    steps, spread = steps[known], spread[known]
    if len(steps) < 3 or spread[0] > SAME or steps[-1] < steps[0] + PARTED_BY:
        return False
    return bool((spread[steps <= steps[0] + 2 * PARTED_BY] < SAME).all())


def _start_same(window: Window, weights: list[Parameter]) -> list[Parameter]:
    """Consecutive layers that both start the same. Noise, such as dropout, makes their units differ only slowly; units
    of layers that read the same input and do not feed each other differ within a few steps."""
    loss = learned(window)
    if loss is None or not loss.left > PARTED_TOO_LATE:
        return []
    starts = [weight.shape[0] > 1 and _starts_same(window, weight) for weight in weights]
    pairs = [place for place in range(len(weights) - 1) if starts[place] and starts[place + 1]]
    return [weight for place, weight in enumerate(weights) if place in pairs or place - 1 in pairs]


def _starts_same(window: Window, weight: Parameter) -> bool:
    steps, spread = window.get(f"unit/{weight.name}/row_spread")
    return bool(len(steps)) and spread[0] < SAME and not (spread[steps <= steps[0] + PARTED_BY] > PARTED).any()


def _start_at_zero(window: Window, weights: list[Parameter]) -> list[Parameter]:
    """Most layers, if they start with zeros: biases tell their units apart, but neither the signal nor the gradient
    gets through two of them in a row. A single one may start so, such as a head or the end of a residual branch."""
    loss = learned(window)
    zero = [weight for weight in weights if weight.shape[0] > 1 and _is_zero(window, weight)]
    is_most = len(zero) >= 2 and 2 * len(zero) > len(weights)
    return zero if is_most and loss is not None and loss.left > PARTED_TOO_LATE else []


def _at_zero(window: Window, zero: list[Parameter]) -> Found:
    site, first = zero[0].name, int(window.get(f"param/{zero[0].name}/norm")[0][0])
    return Found(
        f"{listed([weight.name for weight in zero])} start with zeros: neither the signal nor the gradient gets "
        "through these layers.",
        step=first,
        confidence=0.9,
        sites=[weight.name for weight in zero],
        evidence=[Evidence(f"param/{site}/norm", 0.0, "above 0", first, "norm of the initial weights")],
        remedy="Initialise the weights at random: "
        f"`nn.init.kaiming_normal_({attribute(zero[0].owner)}.weight)`. Only biases may start with zeros.",
    )


def _is_zero(window: Window, weight: Parameter) -> bool:
    values = window.get(f"param/{weight.name}/norm")[1]
    return len(values) > 0 and float(values[0]) == 0.0
