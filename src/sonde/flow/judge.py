"""How well each layer is. Everything is compared with the model's own other layers, so the loss may have any scale.

The numbers the Gradient Flow Toolkit documents (pressure below 0.01, above 100, …) are there as `ABSOLUTE`, for those
who want them: they judge a loss times 1000 differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from sonde.flow.issue import Issue, IssueSeverity
from sonde.flow.metrics import FlowMetrics, Layer, LayerHealth, status_of
from sonde.schema.names import as_code

PENALTY: Final[dict[IssueSeverity, float]] = {"LOW": 10.0, "MEDIUM": 20.0, "HIGH": 35.0, "CRITICAL": 60.0}
FREE_DECADES: Final = 1.0
"""A relative pressure within a factor of ten of the median costs nothing; each further decade costs DECADE points."""
DECADE: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When a layer's pressure is too low or too high, and its turbulence too strong."""

    is_relative: bool = True
    """Whether pressures are compared with the model's own level; else they are taken as they are."""
    vanishing: float = 1e-3
    vanished: float = 1e-5
    exploding: float = 1e3
    exploded: float = 1e5
    turbulent: float = 30.0
    """Ratio of spread to mean of the gradient's magnitude. A sparse gradient is uneven without being sick."""
    dead: float = 0.95
    """Share of zeros in the output of an activation."""


RELATIVE: Final = Thresholds()
ABSOLUTE: Final = Thresholds(
    is_relative=False, vanishing=0.01, vanished=0.001, exploding=100.0, exploded=1000.0, turbulent=5.0
)


def judged(layers: Iterable[Layer], thresholds: Thresholds = RELATIVE, extra: Iterable[Issue] = ()) -> list[Layer]:
    """The layers with their health. `extra` issues, found by an analyzer, lower the score of the layer they name."""
    listed = list(layers)
    others: dict[str, list[Issue]] = {}
    for issue in extra:
        others.setdefault(issue.layer, []).append(issue)
    scale = _typical_ratio(listed)
    return [
        replace(layer, health=_health(layer, [*_issues(layer, thresholds, scale), *others.get(layer.name, ())]))
        for layer in listed
    ]


def _typical_ratio(layers: list[Layer]) -> float:
    """Gradient over weight in the last third of the layers, where gradients come from."""
    ratios = [layer.metrics.weight_ratio for layer in layers if layer.metrics.weight_ratio > 0]
    return median(ratios[-max(3, len(ratios) // 3) :]) if ratios else 0.0


def _health(layer: Layer, issues: list[Issue]) -> LayerHealth:
    """100, less what each issue costs, less ten for each decade the pressure is away from an even flow."""
    away = abs(math.log10(layer.metrics.relative_pressure)) if layer.metrics.relative_pressure > 0 else 0.0
    score = 100.0 - DECADE * max(0.0, away - FREE_DECADES) - sum(PENALTY[issue.severity] for issue in issues)
    if any(issue.type == "NUMERICAL" for issue in issues):
        score = 0.0
    score = min(100.0, max(0.0, score))
    recommendations = tuple(dict.fromkeys(i.recommendation for i in issues if i.recommendation))
    return LayerHealth(score=score, status=status_of(score), issues=tuple(issues), recommendations=recommendations)


def _issues(layer: Layer, thresholds: Thresholds, typical: float) -> list[Issue]:
    metrics = layer.metrics
    if metrics.nonfinite:
        return [_numerical(layer)]
    found = []
    if metrics.weight_norm > 0 and metrics.weight_grad_norm == 0 and metrics.grad_norm == 0:
        return [_dead(layer, "gets no gradient at all")]
    level = _level(metrics, thresholds, typical)
    if level is not None and level < thresholds.vanishing:
        found.append(_vanishing(layer, level, thresholds))
    if level is not None and level > thresholds.exploding:
        found.append(_exploding(layer, level, thresholds))
    if layer.type in _RECTIFIERS and metrics.activation_zero_fraction > thresholds.dead:
        found.append(_dead(layer, f"gives zero for {metrics.activation_zero_fraction:.0%} of its values"))
    return found


_RECTIFIERS: Final = ("ReLU", "ReLU6", "LeakyReLU", "Threshold", "Hardtanh")


def _level(metrics: FlowMetrics, thresholds: Thresholds, typical: float) -> float | None:
    """What is compared with the thresholds. Relative: both the flow through the layer and the change it asks of its
    weights must be off, since either alone differs between layers of different width."""
    if not thresholds.is_relative:
        return metrics.mean_pressure
    if metrics.weight_norm > 0 and typical > 0:
        ratio = metrics.weight_ratio / typical
        flow = metrics.relative_pressure
        if ratio == 0 or flow == 0:
            return None
        return max(ratio, flow) if ratio < 1 and flow < 1 else min(ratio, flow) if ratio > 1 and flow > 1 else 1.0
    return None


def _numerical(layer: Layer) -> Issue:
    return Issue(
        type="NUMERICAL",
        severity="CRITICAL",
        layer=layer.name,
        message=f"{layer.name}: {layer.metrics.nonfinite} values are NaN or infinite",
        recommendation=f"torch.autograd.set_detect_anomaly(True)  # what does {layer.name} take? clamp it, add an eps",
        value=float(layer.metrics.nonfinite),
        healthy="0",
    )


def _dead(layer: Layer, how: str) -> Issue:
    if layer.metrics.weight_norm > 0:
        advice = f"# is {layer.name}'s output used in the loss, or cut off by detach()?"
    else:
        advice = f"{as_code(layer.name)} = nn.LeakyReLU(0.01)  # or a lower learning rate, or a positive bias before it"
    return Issue(
        type="DEAD",
        severity="HIGH",
        layer=layer.name,
        message=f"{layer.name} ({layer.type}) {how}",
        recommendation=advice,
        value=layer.metrics.activation_zero_fraction,
        healthy="0.3 to 0.75 zeros",
    )


def _vanishing(layer: Layer, level: float, thresholds: Thresholds) -> Issue:
    return Issue(
        type="VANISHING",
        severity="CRITICAL" if level < thresholds.vanished else "HIGH",
        layer=layer.name,
        message=f"the gradient reaching {layer.name} is {level:.1e}{_unit(thresholds)}",
        recommendation=(
            f"# behind {layer.name}: nn.LayerNorm({layer.output_shape[-1] if layer.output_shape else '…'}), "
            "a residual x + f(x), or ReLU/GELU instead of sigmoid/tanh;\n"
            f"nn.init.kaiming_normal_({as_code(layer.name)}.weight)"
        ),
        value=level,
        healthy=f"above {thresholds.vanishing:g}",
    )


def _exploding(layer: Layer, level: float, thresholds: Thresholds) -> Issue:
    return Issue(
        type="EXPLODING",
        severity="CRITICAL" if level > thresholds.exploded else "HIGH",
        layer=layer.name,
        message=f"the gradient reaching {layer.name} is {level:.1e}{_unit(thresholds)}",
        recommendation=(
            f"x = gradient_scale(x, {1 / level:.1g})  # before {layer.name}; or normalise what it takes,\n"
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
        ),
        value=level,
        healthy=f"below {thresholds.exploding:g}",
    )


def _unit(thresholds: Thresholds) -> str:
    return " of the model's typical level" if thresholds.is_relative else ""
