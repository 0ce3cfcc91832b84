"""ReLU units that are zero for every input: no gradient passes through them, so they never recover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Lasting, lasting
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.rate import one_digit
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent, since
from sonde.schema.window import Window

DEAD: Final = 0.5
"""Fraction of a layer's units. The 95th percentile of healthy runs is 0.48."""
STUCK: Final = 0.5
"""Final loss as a fraction of its start; a network with units to spare still learns."""
SAME_INPUT: Final = 1e-4
"""Variation of the inputs over the batch; if all are the same, a silent unit means nothing."""
CONSTANT: Final = 0.25
"""Standard deviation over the batch, relative to the output; below it, outputs hardly depend on the input."""
FAINT: Final = 0.01
"""Output of a layer relative to that of the first layer."""
GONE: Final = 0.98
"""A layer without live units cuts off everything before it."""


@rule(
    is_measured=True,
    severity="warning",
    needs=("act/*/rms",),
    causes=(
        "vanishing_gradients",
        "underfitting",
        "rank_collapse",
        "bottleneck_layer",
        "lr_too_low",
        "adam_epsilon_dominates",
        "frozen_layers",
    ),
    references=("Lu et al. 2019, Dying ReLU", "Sokar et al. 2023, dormant neurons"),
)
def dead_relu(window: Window) -> Iterator[Found]:
    """More than half of the units of a layer have been zero for every input."""
    loss = learned(window)
    if loss is None or seen(window, "data/input/sample_std").typical < SAME_INPUT:
        return
    dead = lasting(window, "unit/*/dead", DEAD) or _from_functions(window)
    dead = [layer for layer in dead if layer.level > GONE or not _is_constant(window, layer.site)]
    if not dead:
        return
    is_stuck = loss.left > STUCK or loss.has_diverged
    worst = max(dead, key=lambda layer: layer.level)
    is_fault = is_stuck or (worst.level > GONE and loss.left > 0.1)
    yield _finding(window, dead, worst, None if is_fault else "info")


def _is_constant(window: Window, site: str) -> bool:
    """Whether almost nothing of the input arrives from the start; then half of the units are silent by chance."""
    model = structure(window)
    own = model.module(site)
    layers = [module for module in model.in_order if module.kind in ("linear", "conv")]
    before = [module for module in layers if own is not None and module.order < own.order]
    if not before:
        return False
    spread, size = _first(window, f"unit/{before[-1].name}/batch_std"), _first(window, f"act/{before[-1].name}/rms")
    return spread < CONSTANT or size < FAINT * _first(window, f"act/{layers[0].name}/rms")


def _first(window: Window, name: str) -> float:
    values = window.get(name)[1]
    return float(values[0]) if len(values) else float("nan")


def _from_functions(window: Window) -> list[Lasting]:
    """Dead units when no ReLU module was found: inputs of a layer that are always zero are units of the previous."""
    if window.names("unit/*/dead"):
        return []
    model = structure(window)
    modules = {module.name: module for module in model.modules}
    return [
        layer
        for layer in lasting(window, "unit/*/input_dead", DEAD)
        # Inputs that come from a linear layer are not ReLU outputs: its weights are zero (an adapter at its start).
        if layer.site not in modules or "fed_by" not in modules[layer.site].detail
    ]


def _finding(window: Window, dead: list[Lasting], worst: Lasting, severity: str | None) -> Found:
    first = min(dead, key=lambda layer: layer.since)
    module = structure(window).module(worst.site)
    kind = f" ({module.type})" if module is not None and module.type else ""
    more = "one more layer" if len(dead) == 2 else f"{len(dead) - 1} more layers"
    others = f", as have most units of {more}" if len(dead) > 1 else ""
    what = "units" if f"unit/{worst.site}/dead" in {str(name) for name in window.names("unit/*/dead")} else "inputs"
    return Found(
        f"{percent(worst.level)} of the {what} of {worst.site}{kind} have been zero for every input "
        f"{since(first.since)}{others}.",
        step=first.since,
        confidence=0.85 if worst.level > 0.9 else 0.75,
        sites=[layer.site for layer in sorted(dead, key=lambda layer: -layer.level)],
        evidence=[Evidence(f"unit/{worst.site}/dead", worst.level, "0 to 0.48", first.since, "fraction of dead units")],
        remedy=_remedy(window, first.since),
        severity=severity,
    )


def _remedy(window: Window, since: int) -> str:
    rate = structure(window).group_value("lr")
    if since == 0:
        return (
            "Initialise biases with zeros and weights with `nn.init.kaiming_normal_`, or use `nn.LeakyReLU()` or "
            "`nn.GELU()`."
        )
    lower = f": `lr={one_digit(rate / 10)}` (now {number(rate, 3)})" if isinstance(rate, int | float) and rate else ""
    return f"Lower the learning rate{lower}. Or use `nn.LeakyReLU(0.01)` or `nn.GELU()`, whose units cannot die."
