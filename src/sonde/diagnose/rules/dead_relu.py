"""Rectifiers that are zero for every input: no gradient passes them, so they do not come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Lasting, lasting
from sonde.diagnose.measures.data import seen
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

DEAD: Final = 0.5
"""Share of a layer's units. 0.48 is the 95 % quantile of healthy runs."""
STUCK: Final = 0.5
"""Share of the loss that is left; a net with units to spare loses nothing."""
SAME_INPUT: Final = 1e-4
"""Spread of the inputs over the batch: where all are the same, a silent unit says nothing."""
CONSTANT: Final = 0.25
"""Deviation over the batch, in units of the output, below which a layer tells little of its input."""
FAINT: Final = 0.01
"""Output of a layer over that of the first one."""
GONE: Final = 0.98
"""A layer without any live unit cuts everything before it off."""


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
    ),
    references=("Lu et al. 2019, Dying ReLU", "Sokar et al. 2023, dormant neurons"),
)
def dead_relu(window: Window) -> Iterator[Found]:
    """More than half of the units of a layer have been zero for every input."""
    loss = learned(window)
    if loss is None or seen(window, "data/input/sample_std").typical < SAME_INPUT:
        return
    dead = lasting(window, "unit/*/dead", DEAD) or _behind_functions(window)
    dead = [layer for layer in dead if layer.level > GONE or not _is_constant(window, layer.site)]
    if not dead:
        return
    is_stuck = loss.left > STUCK or loss.has_diverged
    worst = max(dead, key=lambda layer: layer.level)
    is_fault = is_stuck or (worst.level > GONE and loss.left > 0.1)
    yield _finding(window, dead, worst, None if is_fault else "info")


def _is_constant(window: Window, site: str) -> bool:
    """Where next to nothing of the input arrives from the start, half of the units are silent by chance."""
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


def _behind_functions(window: Window) -> list[Lasting]:
    """Where no rectifier was seen at all: inputs of a layer that are always zero are units of the one before it."""
    if window.names("unit/*/dead"):
        return []
    model = structure(window)
    modules = {module.name: module for module in model.modules}
    return [
        layer
        for layer in lasting(window, "unit/*/input_dead", DEAD)
        # What a linear layer gives is not a rectifier's: its weights are zero (an adapter at its start).
        if layer.site not in modules or "fed_by" not in modules[layer.site].detail
    ]


def _finding(window: Window, dead: list[Lasting], worst: Lasting, severity: str | None) -> Found:
    first = min(dead, key=lambda layer: layer.since)
    module = structure(window).module(worst.site)
    kind = f" ({module.type})" if module is not None and module.type else ""
    since = f"since step {first.since}" if first.since else "from the start"
    others = f", and most of those of {len(dead) - 1} more layers" if len(dead) > 1 else ""
    what = "units" if f"unit/{worst.site}/dead" in {str(name) for name in window.names("unit/*/dead")} else "inputs"
    return Found(
        f"{worst.level:.0%} of the {what} of {worst.site}{kind} have been zero for every input {since}{others}",
        step=first.since,
        confidence=0.85 if worst.level > 0.9 else 0.75,
        sites=[layer.site for layer in sorted(dead, key=lambda layer: -layer.level)],
        evidence=[Evidence(f"unit/{worst.site}/dead", worst.level, "0 to 0.48", first.since, "share of dead units")],
        remedy=_remedy(window, first.since),
        severity=severity,
    )


def _remedy(window: Window, since: int) -> str:
    rate = structure(window).group_value("lr")
    if since == 0:
        return (
            "Initialise biases with zeros and weights with nn.init.kaiming_normal_, or use nn.LeakyReLU() or nn.GELU()."
        )
    lower = f"lr={rate / 10:g}  # now {rate:g}" if isinstance(rate, int | float) and rate else "a lower learning rate"
    return f"{lower}; or nn.LeakyReLU(0.01) or nn.GELU() in place of nn.ReLU(), which cannot die."
