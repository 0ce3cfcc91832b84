"""FlowAnalyzer: one batch through a model, every layer judged, the model left as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Protocol

import torch
from torch import nn

from sonde.errors import NotAModelError, UsageError
from sonde.flow.attention_find import queries_and_keys
from sonde.flow.batch import LossFunction, batch_size, copied, part
from sonde.flow.issue import Issue
from sonde.flow.judge import RELATIVE, Thresholds, judged
from sonde.flow.metrics import FlowMetrics, Layer
from sonde.flow.report import FlowReport
from sonde.flow.trace import Passed, Sketch, Stop, Trace, run_pass
from sonde.probe.preserve import all_preserved

Observer = Callable[..., None]
"""Called with (place, module, args, output) for every module call."""


class Analyzer(Protocol):
    """What looks at more than single layers. Several of them share one pass."""

    def watching(self, model: nn.Module) -> AbstractContextManager[Sequence[Observer]]:
        """Open while the passes run; gives what is to be called for every module call."""

    def conclude(self, traces: list[Trace]) -> tuple[list[Issue], dict[str, Any]]:
        """What it found, and what it measured."""


class FlowAnalyzer:
    """Analyses the flow of gradients through a model.

    report = FlowAnalyzer(model).analyze(x, y, nn.CrossEntropyLoss())
    report.print_summary()
    """

    def __init__(self, model: nn.Module, *, thresholds: Thresholds = RELATIVE) -> None:
        if not isinstance(model, nn.Module):
            raise NotAModelError(f"FlowAnalyzer takes a torch.nn.Module; got {type(model).__name__}.")
        self.model, self.thresholds = model, thresholds

    def analyze(self, x: Any, y: Any = None, loss_fn: LossFunction | None = None, steps: int = 1) -> FlowReport:
        """Forward and backward, once or for `steps` parts of the batch. Parameters, buffers, gradients, mode and random
        numbers are afterwards as before."""
        return self.analyze_with((), x, y, loss_fn, steps)

    def analyze_with(
        self, analyzers: Sequence[Analyzer], x: Any, y: Any, loss_fn: LossFunction | None, steps: int = 1
    ) -> FlowReport:
        """The same with the findings of analyzers, all in the same passes."""
        with ExitStack() as stack:
            observers = [o for analyzer in analyzers for o in stack.enter_context(analyzer.watching(self.model))]
            passes = self._passes(x, y, loss_fn, steps, observers)
        apart = queries_and_keys(self.model)  # while a GPU still works on the passes
        traces = [passed.trace() for passed in passes]
        issues: list[Issue] = []
        details: dict[str, Any] = {}
        for analyzer in analyzers:
            found, measures = analyzer.conclude(traces)
            issues += found
            details |= measures
        return self._report(traces, issues, details, apart)

    def _passes(
        self, x: Any, y: Any, loss_fn: LossFunction | None, steps: int, observers: Sequence[Observer]
    ) -> list[Passed]:
        """One pass per part of the batch."""
        if steps < 1:
            raise UsageError(f"steps is at least 1; got {steps}.")
        if steps > 1 and batch_size(x) < steps:
            raise UsageError(f"a batch of {batch_size(x)} cannot be cut into steps={steps} parts.")
        found = []
        with torch.enable_grad(), all_preserved(self.model, loss_fn):
            for index in range(steps):
                pieces = copied(part(x, index, steps)), part(y, index, steps)
                found.append(run_pass(self.model, *pieces, loss_fn, observers=tuple(observers)))
                for parameter in self.model.parameters():
                    parameter.grad = None
        return found

    def _report(
        self, traces: list[Trace], issues: Sequence[Issue], details: dict[str, Any], apart: set[str]
    ) -> FlowReport:
        """Judge what was seen; `issues` are what an analyzer found beyond single layers."""
        layers = judged(measured(traces), self.thresholds, issues, apart)
        return FlowReport(
            model_name=type(self.model).__name__,
            loss=fmean(t.loss for t in traces),
            layers=tuple(layers),
            model_issues=tuple(issue for issue in issues if issue.layer not in {layer.name for layer in layers}),
            details=details,
            is_relative=self.thresholds.is_relative,
        )


def measured(traces: list[Trace]) -> list[Layer]:
    """Every module with its metrics, in the order of the forward pass; of several passes, their mean."""
    stops = traces[0].in_order()
    typical = [(_near_output(t, _pressure), _near_output(t, _flow)) for t in traces]
    layers = []
    for stop in stops:
        passes = [_metrics(t, stop, *levels) for t, levels in zip(traces, typical, strict=True)]
        layers.append(
            Layer(
                name=stop.name,
                type=stop.type,
                order=stop.order,
                metrics=_mean(passes),
                num_parameters=stop.num_parameters,
                input_shape=stop.input_shape,
                output_shape=stop.output_shape,
                is_leaf=stop.is_leaf,
                is_trainable=stop.is_trainable,
            )
        )
    return layers


def _near_output(t: Trace, measure: Callable[[Trace, Stop], float]) -> float:
    """The median over the last third of the leaf modules: gradients come from there, so what is less further forward
    has vanished on the way, and what is more has exploded."""
    levels = [level for stop in t.in_order() if stop.is_leaf and (level := measure(t, stop)) > 0]
    return median(levels[-max(3, len(levels) // 3) :]) if levels else 0.0


def _pressure(t: Trace, stop: Stop) -> float:
    grad = t.get("actgrad", stop.name)
    return grad.norm if grad is not None else 0.0


def _flow(t: Trace, stop: Stop) -> float:
    act, grad = t.get("act", stop.name), t.get("actgrad", stop.name)
    return act.norm * grad.norm if act is not None and grad is not None else 0.0


def _relative(level: float, typical: float, is_known: bool) -> float:
    return level / typical if typical and level else 0.0 if is_known else 1.0


def _metrics(t: Trace, stop: Stop, typical_pressure: float, typical_flow: float) -> FlowMetrics:
    grad, act = t.get("actgrad", stop.name), t.get("act", stop.name)
    weights = [s for name in stop.parameters if (s := t.get("param", name)) is not None]
    weight_grads = [s for name in stop.parameters if (s := t.get("grad", name)) is not None]
    return FlowMetrics(
        mean_pressure=grad.mean_abs if grad else 0.0,
        max_pressure=grad.max_abs if grad else 0.0,
        turbulence=_turbulence(grad),
        relative_pressure=_relative(_pressure(t, stop), typical_pressure, grad is not None),
        relative_flow=_relative(_flow(t, stop), typical_flow, grad is not None),
        grad_norm=grad.norm if grad else 0.0,
        activation_rms=act.rms if act else 0.0,
        activation_zero_fraction=act.zero_fraction if act else 0.0,
        silent_units=t.silent.get(stop.name, 0.0),
        saturated=t.saturated.get(stop.name, 0.0),
        weight_norm=_norm(weights),
        weight_grad_norm=_norm(weight_grads),
        nonfinite=sum(s.nonfinite for s in (grad, act, *weight_grads) if s is not None),
        calls=stop.calls,
    )


def _turbulence(grad: Sketch | None) -> float:
    if grad is None or not grad.mean_abs:
        return 0.0
    variance = max(grad.rms**2 - grad.mean_abs**2, 0.0)
    return float(variance**0.5 / grad.mean_abs)


def _norm(sketches: list[Sketch]) -> float:
    return float(sum(s.norm**2 for s in sketches) ** 0.5)


def _mean(passes: list[FlowMetrics]) -> FlowMetrics:
    if len(passes) == 1:
        return passes[0]
    pressures = [m.mean_pressure for m in passes]
    changes = [abs(b - a) / a for a, b in pairwise(pressures) if a]
    values: dict[str, Any] = {
        name: fmean(getattr(m, name) for m in passes) for name in FlowMetrics.__dataclass_fields__
    }
    values |= {"velocity": fmean(changes) if changes else 0.0, "max_pressure": max(m.max_pressure for m in passes)}
    return FlowMetrics(**{**values, "nonfinite": sum(m.nonfinite for m in passes), "calls": passes[0].calls})
