"""StandardAnalyzer: the depth profile of a feed-forward network, its bottlenecks, and its layers by type."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar, Final

import numpy as np
from torch import nn

from sonde.flow.batch import LossFunction
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.judge import RELATIVE, Thresholds, most_wait
from sonde.flow.model_index import ModelIndex
from sonde.flow.trace import Observer, Trace
from sonde.schema.names import as_code
from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import Layer
from sonde.show.flow.report import FlowReport

DECAY: Final = -0.5
"""Log-slope per layer, from the output towards the input, below which gradients decay; below twice that severely."""
LOST: Final = 0.01
"""And less than this fraction of them is left at the input: a short network may lose half per layer and learn well.
Severe below a tenth of it."""
COMPRESSION: Final = 0.25
"""A layer whose output has at most this fraction of its input's width compresses."""
AMPLIFICATION: Final = 5.0
"""And it amplifies if the gradient at its input exceeds the one at its output by this factor, compared with other
layers."""
VARIANCE: Final = 1.0
"""Variance over squared mean of gradient/weight among layers with the same role."""


@dataclass(frozen=True, slots=True)
class DepthPoint:
    """A layer with weights, by its depth."""

    depth: int
    layer: str
    pressure: float
    relative_pressure: float
    weight_ratio: float


class StandardAnalyzer:
    """For MLPs and CNNs; pass the model to `analyze`.

    report = StandardAnalyzer().analyze(model, x, y, loss_fn)
    """

    needs_input_grads: ClassVar = False

    def __init__(self, *, thresholds: Thresholds = RELATIVE) -> None:
        self.thresholds = thresholds
        self.report: FlowReport | None = None

    def analyze(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, steps: int = 1
    ) -> FlowReport:
        self.report = FlowAnalyzer(model, thresholds=self.thresholds).analyze_with([self], x, y, loss_fn, steps)
        return self.report

    def watching(self, anatomy: ModelIndex) -> AbstractContextManager[Sequence[Observer]]:
        """Observes nothing beyond what every pass records."""
        return nullcontext(())

    def after_pass(self) -> None:
        """Launches nothing: the traces have everything."""

    def conclude(self, traces: list[Trace], layers: Sequence[Layer]) -> tuple[list[Issue], dict[str, Any]]:
        profile = depth_profile(layers)
        trunk = depth_profile([layer for layer in layers if layer.route.place is not None])
        slope = decay_slope(trunk)
        issues = [*([] if most_wait(layers) else _decay(slope, trunk)), *_bottlenecks(layers), *_variance(layers)]
        return issues, {"depth_profile": [vars_of(point) for point in profile], "decay": slope}

    def get_layer_type_stats(self) -> dict[str, dict[str, float]]:
        """Mean and largest pressure, mean score and number, by type of layer."""
        groups: dict[str, list[Layer]] = {}
        for layer in self._required.layers:
            groups.setdefault(layer.type, []).append(layer)
        return {
            name: {
                "count": float(len(layers)),
                "mean_pressure": fmean(layer.metrics.mean_pressure for layer in layers),
                "max_pressure": max(layer.metrics.max_pressure for layer in layers),
                "mean_health": fmean(layer.health.score for layer in layers),
            }
            for name, layers in groups.items()
        }

    def get_depth_profile(self) -> list[DepthPoint]:
        """Pressure of every layer with weights, from input to output."""
        return depth_profile(self._required.layers)

    @property
    def _required(self) -> FlowReport:
        if self.report is None:
            from sonde.errors import UsageError

            raise UsageError("nothing to report yet. Call analyze(model, x, y, loss_fn) first.")
        return self.report


def vars_of(point: DepthPoint) -> dict[str, Any]:
    return {name: getattr(point, name) for name in DepthPoint.__dataclass_fields__}


def depth_profile(layers: Sequence[Layer]) -> list[DepthPoint]:
    weighted = [la for la in layers if la.metrics.weight_norm > 0 and la.is_leaf and la.metrics.grad_norm > 0]
    matrices = [layer for layer in weighted if not layer.type.endswith("Norm") and "BatchNorm" not in layer.type]
    return [
        DepthPoint(i, la.name, la.metrics.mean_pressure, la.metrics.relative_pressure, la.metrics.weight_ratio)
        for i, la in enumerate(matrices)
    ]


def decay_slope(profile: Sequence[DepthPoint]) -> float:
    """Natural logarithm of the flow, per layer from the output to the input: negative if gradients decay."""
    flowing = [point.relative_pressure for point in profile if point.relative_pressure > 0]
    if len(flowing) < 4:
        return 0.0
    logs = np.log(flowing)
    return -float(np.polyfit(np.arange(len(logs)), logs, 1)[0])


def _decay(slope: float, profile: Sequence[DepthPoint]) -> list[Issue]:
    left = math.exp(slope * (len(profile) - 1))
    if slope >= DECAY or left > LOST:
        return []
    first = profile[0].layer
    return [
        Issue(
            type="DECAY",
            severity="HIGH" if slope < 2 * DECAY and left < LOST / 10 else "MEDIUM",
            layer="",
            message=f"gradients shrink to {math.exp(slope):.0%} per layer on the way back to the input",
            recommendation=(
                "x = x + layer(norm(x))  # a residual around each layer, or LayerNorm/BatchNorm after it\n"
                f"nn.init.kaiming_normal_({as_code(first)}.weight)  # and ReLU/GELU instead of sigmoid/tanh"
            ),
            value=slope,
            healthy=f"above {math.exp(DECAY):.0%}",
        )
    ]


def _bottlenecks(layers: Sequence[Layer]) -> list[Issue]:
    """Gradient of the layer before over the layer's own: the factor of the gradient on its way back through the layer.
    Known if its input comes from one layer that serves no other: a gate's gradient is not that of the experts."""
    by_name = {la.name: la for la in layers if la.is_leaf and la.metrics.grad_norm > 0}
    factors = {
        la.name: by_name[la.route.source].metrics.grad_norm / la.metrics.grad_norm
        for la in by_name.values()
        if la.metrics.weight_norm > 0 and la.route.source in by_name
    }
    found = []
    for name, factor in factors.items():
        widths = _widths(by_name[name])
        if widths is None or widths[1] / max(widths[0], 1) > COMPRESSION:
            continue
        typical = max(1.0, median([f for other, f in factors.items() if other != name] or [1.0]))
        if factor > AMPLIFICATION * typical:
            found.append(_bottleneck(by_name[name], widths, factor))
    return found


def _widths(layer: Layer) -> tuple[int, int] | None:
    """Channels of input and output."""
    taken, given = layer.input_shape, layer.output_shape
    dim = 1 if layer.type.startswith("Conv") and min(len(taken), len(given)) > 2 else -1
    return (taken[dim], given[dim]) if taken and given else None


def _bottleneck(layer: Layer, widths: tuple[int, int], factor: float) -> Issue:
    wide, narrow = widths
    middle = round((wide * narrow) ** 0.5)
    return Issue(
        type="BOTTLENECK",
        severity="HIGH" if factor > 10 * AMPLIFICATION else "MEDIUM",
        layer=layer.name,
        message=f"{layer.name} compresses {wide} to {narrow} and multiplies the gradient by {factor:.1f}",
        recommendation=(
            f"x = nn.LayerNorm({wide})(x)  # before {layer.name}\n"
            f"x = gradient_scale(x, {1 / factor:.2g})  # or in two steps: Linear({wide}, {middle}), GELU"
        ),
        value=factor,
        healthy=f"below {AMPLIFICATION:g}",
    )


def _variance(layers: Sequence[Layer]) -> list[Issue]:
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        if layer.metrics.weight_ratio > 0:
            role = re.sub(r"\b\d+\b", "*", layer.name)  # the same part of every block
            groups.setdefault((role, layer.type, layer.num_parameters), []).append(layer)
    found = []
    for group in groups.values():
        if len(group) < 4:
            continue
        ratios = np.array([layer.metrics.weight_ratio for layer in group])
        spread = float(ratios.var() / ratios.mean() ** 2)
        if spread > VARIANCE:
            worst = group[int(ratios.argmax())]
            fold = ratios.max() / ratios.min()
            found.append(
                Issue(
                    type="LAYER_VARIANCE",
                    severity="MEDIUM",
                    layer=worst.name,
                    message=f"{len(group)} similar layers get gradients that differ {fold:.3g}-fold",
                    recommendation=(
                        f"# {worst.name} gets the most: normalise before each of them, or initialise them identically\n"
                        f"nn.init.orthogonal_({as_code(worst.name)}.weight)"
                    ),
                    value=spread,
                    healthy=f"variance below {VARIANCE:g} of the squared mean",
                )
            )
    return found
