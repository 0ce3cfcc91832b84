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
    regions = {layer.route.region for layer in listed}
    scales = {region: _typical_ratio([la for la in listed if la.route.region == region]) for region in regions}
    norms = {layer.name for layer in listed if "norm" in layer.type.lower()}
    opens = most_wait(listed)
    if opens and thresholds.is_relative:
        thresholds = replace(thresholds, free_decades=math.inf)
    lenient, of_branch = _lenient(thresholds), _of_branch(thresholds)
    judged_layers = []
    for layer in listed:
        is_asking, route = layer.name in behind_softmax, layer.route
        is_branch = route.place is None
        own = of_branch if is_branch else lenient if is_asking else thresholds
        is_scaled = is_branch or (bool(route.used_by) and norms.issuperset(route.used_by))
        found = (
            []
            if _waits(layer, is_asking) or (is_branch and is_asking and not layer.metrics.nonfinite)
            else _issues(layer, own, scales[route.region], is_scaled, opens)
        )
        issues = [*found, *others.get(layer.name, ())]
        judged_layers.append(layer.judged(_health(layer, issues, own, is_scaled)))
    return judged_layers


def most_wait(layers: Iterable[Layer]) -> bool:
    """Whether weights close to zero follow on most layers. Until these open, inputs make next to no difference, and
    the gradient of the other layers shows little."""
    waiting = [bool(layer.route.region) for layer in layers if layer.num_parameters]
    return 2 * sum(waiting) > len(waiting)


def _waits(layer: Layer, is_asking: bool) -> bool:
    """Whether a layer gets no gradient for a reason that is not its own: a weight that is still zero, keys that are all
    the same, or no part in the loss, which is an issue of the model."""
    metrics, route = layer.metrics, layer.route
    if metrics.nonfinite or metrics.grad_norm or metrics.weight_grad_norm or not layer.is_trainable:
        return False
    return route.is_waiting or is_asking or not (route.is_connected or route.is_detached)


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


def _of_branch(thresholds: Thresholds) -> Thresholds:
    """For a branch that the gradient also flows around: how much one gets is the choice of its model."""
    if not thresholds.is_relative:
        return thresholds
    return replace(thresholds, vanishing=1e-2 * thresholds.vanishing, free_decades=math.inf)


def _typical_ratio(layers: list[Layer]) -> float:
    """Gradient over weight in the last third of the layers that everything passes, where gradients come from."""
    known = [layer for layer in layers if layer.metrics.weight_ratio > 0]
    main = [layer for layer in known if layer.route.place is not None] or known
    ratios = [layer.metrics.weight_ratio for layer in main]
    return median(ratios[-max(3, len(ratios) // 3) :]) if ratios else 0.0


def _health(layer: Layer, issues: list[Issue], thresholds: Thresholds, is_scaled: bool) -> LayerHealth:
    """100, minus the cost of each issue, minus the cost of an uneven flow."""
    metrics = layer.metrics
    cost = _unevenness(metrics, thresholds, is_scaled) if thresholds.is_relative else _out_of_range(metrics, thresholds)
    if not issues and not cost:
        return WELL
    score = 100.0 - sum(PENALTY[issue.severity] for issue in issues) - cost
    if any(issue.type == "NUMERICAL" for issue in issues):
        score = 0.0
    score = min(100.0, max(0.0, score))
    recommendations = tuple(dict.fromkeys(i.recommendation for i in issues if i.recommendation))
    return LayerHealth(score=score, status=status_of(score), issues=tuple(issues), recommendations=recommendations)


def _unevenness(metrics: FlowMetrics, thresholds: Thresholds, is_scaled: bool) -> float:
    """Ten points for each decade by which flow or pressure deviates from even beyond the tolerance."""
    if is_scaled and not metrics.weight_norm:
        return 0.0
    flow = _decades(metrics.relative_flow)
    pressure = 0.0 if is_scaled else _decades(metrics.relative_pressure)
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


def _issues(layer: Layer, thresholds: Thresholds, typical: float, is_scaled: bool, opens: bool) -> list[Issue]:
    metrics = layer.metrics
    if metrics.nonfinite:
        return [numerical(layer)]
    if layer.is_trainable and metrics.weight_norm > 0 and metrics.weight_grad_norm == 0 and metrics.grad_norm == 0:
        return [dead(layer)]
    found = []
    level = _level(metrics, thresholds, typical, is_scaled)
    # Nothing is lost before a branch; and if it explodes, so do the layers before it.
    is_branch = layer.route.place is None and thresholds.is_relative
    if level is not None and level < thresholds.vanishing:
        severity: IssueSeverity = "CRITICAL" if level < thresholds.vanished else "HIGH"
        severity = "MEDIUM" if is_branch or opens else severity
        found.append(vanishing(layer, severity, level, thresholds.vanishing, _unit(thresholds)))
    if level is not None and level > thresholds.exploding:
        severity = "CRITICAL" if level > thresholds.exploded else "HIGH"
        severity = "MEDIUM" if is_branch else severity
        found.append(exploding(layer, severity, level, thresholds.exploding, _unit(thresholds)))
    is_rectifier = layer.type in _RECTIFIERS and metrics.activation_zero_fraction > thresholds.dead
    if is_rectifier or metrics.silent_units > thresholds.silent:
        found.append(silent(layer, "HIGH" if is_rectifier or metrics.silent_units > 0.9 else "MEDIUM"))
    if metrics.saturated > thresholds.saturated:
        found.append(saturated(layer, "HIGH" if metrics.saturated > 0.9 else "MEDIUM", thresholds.saturated))
    return found


_RECTIFIERS: Final = ("ReLU", "ReLU6", "LeakyReLU", "Threshold", "Hardtanh")


def _level(metrics: FlowMetrics, thresholds: Thresholds, typical: float, is_scaled: bool) -> float | None:
    """The value that is compared with the thresholds. Relative: the pressure or, if that is further off, a value that
    does not depend on scale: flow and gradient/weight must both be off, since either alone differs between widths.
    `is_scaled`: the scale of the layer's values, and with it the pressure, has no meaning, because a norm follows or
    the values are added to others."""
    if not thresholds.is_relative:
        return metrics.mean_pressure if metrics.grad_norm > 0 else None
    if not (metrics.weight_norm > 0 and typical > 0) or not metrics.relative_pressure:
        return None
    ratio, flow = metrics.weight_ratio / typical, metrics.relative_flow
    both = max(ratio, flow) if ratio < 1 and flow < 1 else min(ratio, flow) if ratio > 1 and flow > 1 else 1.0
    levels = [both] if is_scaled else [level for level in (both, metrics.relative_pressure) if level > 0]
    return max(levels, key=lambda level: abs(math.log(level)))


def _unit(thresholds: Thresholds) -> str:
    return " of the model's typical level" if thresholds.is_relative else ""
