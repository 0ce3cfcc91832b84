"""Units of a layer that start the same and stay the same: the layer is one unit wide, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.depth import path
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

SAME: Final = 1e-3
"""Largest deviation of a row from the mean row, over the weights' root mean square. Random rows: 2 to 5."""
PARTED_BY: Final = 10
"""Steps after which rows that start the same on purpose (a head, a residual branch of zeros) have parted."""


PARTED: Final = 1.0
"""Deviation above which rows have parted."""

PARTED_TOO_LATE: Final = 0.3
"""Share of the loss that is left."""


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
    """All units of a layer are the same and get the same gradient, so they never part."""
    weights = [weight for weight in path(window) if weight.in_optimizer]
    same = [weight for weight in weights[:-1] if weight.shape[0] > 1 and _stays_same(window, weight)]
    same = same or _start_same(window, weights)
    if not same:
        return
    site = same[0].name
    spread = float(window.get(f"unit/{site}/row_spread")[1][-1])
    zeros = all(_is_zero(window, weight) for weight in same)
    names = ", ".join(weight.name for weight in same[:3]) + ("…" if len(same) > 3 else "")
    yield Found(
        f"all {same[0].shape[0]} units of {names} start with the same weights{' (zeros)' if zeros else ''} and do "
        "not part: each layer does the work of a single unit",
        step=int(window.get(f"unit/{site}/row_spread")[0][0]),
        confidence=0.95,
        sites=[weight.name for weight in same],
        evidence=[Evidence(f"unit/{site}/row_spread", spread, "above 1", meaning="deviation of units from their mean")],
        remedy=f"nn.init.kaiming_normal_(model.{same[0].owner}.weight)  # random, so that units differ",
    )


def _stays_same(window: Window, weight: Parameter) -> bool:
    steps, spread = window.get(f"unit/{weight.name}/row_spread")
    known = np.isfinite(spread)
    steps, spread = steps[known], spread[known]
    if len(steps) < 3 or spread[0] > SAME or steps[-1] < steps[0] + PARTED_BY:
        return False
    return bool((spread[steps <= steps[0] + 2 * PARTED_BY] < SAME).all())


def _start_same(window: Window, weights: list[Parameter]) -> list[Parameter]:
    """Two layers in a row that start the same: noise, such as dropout, may part them, but that is slow. Layers that
    read the same input, and do not feed one another, part within a few steps."""
    loss = learned(window)
    if loss is None or not loss.left > PARTED_TOO_LATE:
        return []
    starts = [weight.shape[0] > 1 and _starts_same(window, weight) for weight in weights]
    pairs = [place for place in range(len(weights) - 1) if starts[place] and starts[place + 1]]
    return [weight for place, weight in enumerate(weights) if place in pairs or place - 1 in pairs]


def _starts_same(window: Window, weight: Parameter) -> bool:
    steps, spread = window.get(f"unit/{weight.name}/row_spread")
    return bool(len(steps)) and spread[0] < SAME and not (spread[steps <= steps[0] + PARTED_BY] > PARTED).any()


def _is_zero(window: Window, weight: Parameter) -> bool:
    values = window.get(f"param/{weight.name}/norm")[1]
    return len(values) > 0 and float(values[0]) == 0.0
