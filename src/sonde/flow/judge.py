"""The health of each layer. Everything is compared with the model's own other layers, so the loss may have any scale.

The thresholds that the Gradient Flow Toolkit documents (pressure below 0.01, above 100, …) are available as `ABSOLUTE`:
they judge a loss times 1000 differently.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from sonde.flow.advice import dead, exploding, numerical, saturated, silent, vanishing
from sonde.show.flow.issue import PENALTY, Issue, IssueSeverity
from sonde.show.flow.metrics import WELL, FlowMetrics, Layer, LayerHealth, status_of

DECADE: Final = 10.0
"""Points for each decade by which a flow deviates from even beyond the tolerance."""
OUT_OF_RANGE: Final = 30.0
"""Points for a pressure or turbulence outside its good range that is not an issue yet: the layer is then WARNING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits for a layer's pressure and turbulence."""

    is_relative: bool = True
    """Whether pressures are compared with the model's own level; otherwise their absolute values count."""
    vanishing: float = 1e-3
    vanished: float = 1e-5
    """Below `vanishing` an issue, below `vanished` a critical one."""
    exploding: float = 1e3
    exploded: float = 1e5
    free_decades: float = 1.0
    """A flow within a factor of ten of even costs nothing. A pressure may be off by one decade more: it also depends on
    the scale of a layer's values."""
    good: tuple[float, float] | None = None
    """Pressures outside of this cost points."""
    turbulent: float = 30.0
    """Ratio of spread to mean of the gradient's magnitude. A sparse gradient is uneven without being a problem."""
    very_turbulent: float = math.inf
    dead: float = 0.95
    """Fraction of zeros in the output of an activation."""
    silent: float = 0.5
    """Fraction of units that are zero for the whole batch; above 0.9 severe."""
    saturated: float = 0.5
    """Fraction of saturated values of an activation; above 0.9 severe."""


RELATIVE: Final = Thresholds()
ABSOLUTE: Final = Thresholds(
    is_relative=False,
    vanishing=0.01,
    vanished=0.01,
    exploding=100.0,
    exploded=100.0,
    good=(0.1, 10.0),
    turbulent=1.0,
    very_turbulent=5.0,
)


def judged(
    layers: Iterable[Layer],
    thresholds: Thresholds = RELATIVE,
    extra: Iterable[Issue] = (),
    behind_softmax: Container[str] = (),
) -> list[Layer]:
    """The layers with their health. `extra` issues, found by an analyzer, lower the score of their layer."""
    listed = list(layers)
    others: dict[str, list[Issue]] = {}
    for issue in extra:
        others.setdefault(issue.layer, []).append(issue)
    scale = _typical_ratio(listed)
    lenient = _lenient(thresholds)
    judged_layers = []
    for layer in listed:
        own = lenient if layer.name in behind_softmax else thresholds
        issues = [*_issues(layer, own, scale), *others.get(layer.name, ())]
        judged_layers.append(layer.judged(_health(layer, issues, own)))
    return judged_layers


def _lenient(thresholds: Thresholds) -> Thresholds:
    """For queries and keys: while attention is still uniform, as at initialisation, they rightly get next to
    nothing."""
    if not thresholds.is_relative:
        return thresholds
    return replace(
        thresholds,
        vanishing=1e-3 * thresholds.vanishing,
        vanished=1e-3 * thresholds.vanished,
        free_decades=thresholds.free_decades + 3,
    )


def _typical_ratio(layers: list[Layer]) -> float:
    """Gradient over weight in the last third of the layers, where gradients come from."""
    ratios = [ratio for layer in layers if (ratio := layer.metrics.weight_ratio) > 0]
    return median(ratios[-max(3, len(ratios) // 3) :]) if ratios else 0.0


def _health(layer: Layer, issues: list[Issue], thresholds: Thresholds) -> LayerHealth:
    """100, minus the cost of each issue, minus the cost of an uneven flow."""
    cost = (_unevenness if thresholds.is_relative else _out_of_range)(layer.metrics, thresholds)
    if not issues and not cost:
        return WELL
    score = 100.0 - sum(PENALTY[issue.severity] for issue in issues) - cost
    if any(issue.type == "NUMERICAL" for issue in issues):
        score = 0.0
    score = min(100.0, max(0.0, score))
    recommendations = tuple(dict.fromkeys(i.recommendation for i in issues if i.recommendation))
    return LayerHealth(score=score, status=status_of(score), issues=tuple(issues), recommendations=recommendations)


def _unevenness(metrics: FlowMetrics, thresholds: Thresholds) -> float:
    """Ten points for each decade by which flow or pressure deviates from even beyond the tolerance."""
    flow, pressure = _decades(metrics.relative_flow), _decades(metrics.relative_pressure)
    return DECADE * max(0.0, flow - thresholds.free_decades, pressure - thresholds.free_decades - 1)


def _decades(level: float) -> float:
    """Distance from 1."""
    return abs(math.log10(level)) if level > 0 else 0.0


def _out_of_range(metrics: FlowMetrics, thresholds: Thresholds) -> float:
    """The documented absolute ranges. A pressure beyond them costs as much as an issue; turbulence has no issue."""
    cost = 0.0
    level, turbulence = metrics.mean_pressure, metrics.turbulence
    if thresholds.good is not None and metrics.grad_norm > 0:
        is_issue = level < thresholds.vanishing or level > thresholds.exploding
        low, high = thresholds.good
        cost += OUT_OF_RANGE if not is_issue and not low <= level <= high else 0.0
    if turbulence > thresholds.very_turbulent:
        cost += 2 * OUT_OF_RANGE
    elif turbulence > thresholds.turbulent:
        cost += OUT_OF_RANGE
    return cost


def _issues(layer: Layer, thresholds: Thresholds, typical: float) -> list[Issue]:
    metrics = layer.metrics
    if metrics.nonfinite:
        return [numerical(layer)]
    if layer.is_trainable and metrics.weight_norm > 0 and metrics.weight_grad_norm == 0 and metrics.grad_norm == 0:
        return [dead(layer)]
    found = []
    level = _level(metrics, thresholds, typical)
    if level is not None and level < thresholds.vanishing:
        severity: IssueSeverity = "CRITICAL" if level < thresholds.vanished else "HIGH"
        found.append(vanishing(layer, severity, level, thresholds.vanishing, _unit(thresholds)))
    if level is not None and level > thresholds.exploding:
        severity = "CRITICAL" if level > thresholds.exploded else "HIGH"
        found.append(exploding(layer, severity, level, thresholds.exploding, _unit(thresholds)))
    is_rectifier = layer.type in _RECTIFIERS and metrics.activation_zero_fraction > thresholds.dead
    if is_rectifier or metrics.silent_units > thresholds.silent:
        found.append(silent(layer, "HIGH" if is_rectifier or metrics.silent_units > 0.9 else "MEDIUM"))
    if metrics.saturated > thresholds.saturated:
        found.append(saturated(layer, "HIGH" if metrics.saturated > 0.9 else "MEDIUM", thresholds.saturated))
    return found


_RECTIFIERS: Final = ("ReLU", "ReLU6", "LeakyReLU", "Threshold", "Hardtanh")


def _level(metrics: FlowMetrics, thresholds: Thresholds, typical: float) -> float | None:
    """The value that is compared with the thresholds. Relative: the pressure or, if that is further off, a value that
    does not depend on scale: flow and gradient/weight must both be off, since either alone differs between widths."""
    if not thresholds.is_relative:
        return metrics.mean_pressure if metrics.grad_norm > 0 else None
    if not (metrics.weight_norm > 0 and typical > 0) or not metrics.relative_pressure:
        return None
    ratio, flow = metrics.weight_ratio / typical, metrics.relative_flow
    both = max(ratio, flow) if ratio < 1 and flow < 1 else min(ratio, flow) if ratio > 1 and flow > 1 else 1.0
    levels = [level for level in (both, metrics.relative_pressure) if level > 0]
    return max(levels, key=lambda level: abs(math.log(level)))


def _unit(thresholds: Thresholds) -> str:
    return " of the model's typical level" if thresholds.is_relative else ""
