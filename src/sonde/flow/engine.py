"""FlowAnalyzer: one batch through a model, every layer judged, the model left unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn

from sonde.errors import NotAModelError, UsageError
from sonde.flow.advice import unused, without_gradient
from sonde.flow.batch import LossFunction, batch_size, copied, part
from sonde.flow.judge import RELATIVE, Thresholds, judged, most_wait
from sonde.flow.model_index import ModelIndex, queries_and_keys
from sonde.flow.route import routes
from sonde.flow.sketch import Sketch
from sonde.flow.symmetry import rank_collapse, symmetric
from sonde.flow.trace import Observer, PassResult, Stop, Trace, run_pass
from sonde.probe.compiled import run_eagerly
from sonde.probe.model import child_of, type_name
from sonde.probe.preserve import all_preserved
from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import FlowMetrics, Layer, Route
from sonde.show.flow.report import FlowReport


class Analyzer(Protocol):
    """An analysis of more than single layers. Several of them share one pass."""

    needs_input_grads: ClassVar[bool]
    """Whether it makes gradients flow to more than the model's parameters: finding what else they reach takes a
    while."""

    def watching(self, anatomy: ModelIndex) -> AbstractContextManager[Sequence[Observer]]:
        """A context for the passes; returns functions to call for every module call."""

    def after_pass(self) -> None:
        """Gradients exist, and a GPU is still working on them: launch everything now that would be waited for later."""

    def conclude(self, traces: list[Trace], layers: Sequence[Layer]) -> tuple[list[Issue], dict[str, Any]]:
        """Its issues and its metrics."""


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
        """Run forward and backward, once or for `steps` micro-batches. Parameters, buffers, gradients, mode and random
        numbers are unchanged afterwards."""
        return self.analyze_with((), x, y, loss_fn, steps)

    def analyze_with(
        self,
        analyzers: Sequence[Analyzer],
        x: Any,
        y: Any,
        loss_fn: LossFunction | None,
        steps: int = 1,
        *,
        anatomy: ModelIndex | None = None,
    ) -> FlowReport:
        """The same with the issues of analyzers, all in the same passes. `anatomy`: the model's, if known."""
        known = anatomy or ModelIndex(self.model)
        _refuse_scripted(known)
        with ExitStack() as stack:
            observers = [o for analyzer in analyzers for o in stack.enter_context(analyzer.watching(known))]
            everywhere = any(analyzer.needs_input_grads for analyzer in analyzers)
            run = partial(run_pass, self.model, names=known.names, observers=observers, everywhere=everywhere)
            passes = self._passes(run, analyzers, x, y, loss_fn, steps)
        apart = queries_and_keys(known.attention)  # while a GPU is still working on the passes
        traces = [passed.trace() for passed in passes]
        layers = measured(traces)
        issues = whole_model_issues(known, traces, layers)
        details: dict[str, Any] = {}
        for analyzer in analyzers:
            found, measures = analyzer.conclude(traces, layers)
            issues += found
            details |= measures
        judged_layers = judged(layers, self.thresholds, issues, apart)
        return self._report(fmean(t.loss for t in traces), judged_layers, issues, details)

    def _passes(
        self,
        run: Callable[..., PassResult],
        analyzers: Sequence[Analyzer],
        x: Any,
        y: Any,
        loss_fn: LossFunction | None,
        steps: int,
    ) -> list[PassResult]:
        """One pass per micro-batch."""
        if steps < 1:
            raise UsageError(f"steps= must be at least 1; got {steps}.")
        if steps > 1 and batch_size(x) < steps:
            raise UsageError(f"cannot split a batch of {batch_size(x)} into steps={steps} micro-batches.")
        found = []
        with torch.enable_grad(), run_eagerly(), all_preserved(self.model, loss_fn):
            for index in range(steps):
                pieces = copied(part(x, index, steps)), part(y, index, steps)
                found.append(run(*pieces, loss_fn))
                for analyzer in analyzers:
                    analyzer.after_pass()
                for named in found[-1].names.parameters.values():
                    if (parameter := named.ref()) is not None:
                        parameter.grad = None
        return found

    def _report(
        self, loss: float, layers: Sequence[Layer], issues: Sequence[Issue], details: dict[str, Any]
    ) -> FlowReport:
        """`issues` are those that an analyzer found beyond single layers."""
        names = {layer.name for layer in layers}
        return FlowReport(
            model_name=type_name(child_of(self.model, "_orig_mod") or self.model),
            loss=loss,
            layers=tuple(layers),
            model_issues=tuple(issue for issue in issues if issue.layer not in names),
            details=details,
            is_relative=self.thresholds.is_relative,
        )


def _refuse_scripted(anatomy: ModelIndex) -> None:
    """No hook sees the modules inside a scripted one: without them, a report would call anything healthy."""
    hidden = anatomy.names.scripted_inside()
    if hidden:
        raise UsageError(
            f"{len(hidden)} modules, such as {hidden[0]}, run as TorchScript, which hides their gradients. "
            "Analyze the Python model that it was made from."
        )


def measured(traces: list[Trace]) -> list[Layer]:
    """Every module with its metrics, in the order of the forward pass; with several passes, their mean."""
    stops = traces[0].in_order()
    leaves = frozenset(stop.name for stop in stops if stop.is_leaf)
    ways = [routes(t.graph, t.weights(), leaves) for t in traces]
    by_pass = [_metrics(t, stops, way) for t, way in zip(traces, ways, strict=True)]
    return [
        Layer(
            name=stop.name,
            type=stop.type,
            order=stop.order,
            metrics=_mean(metrics),
            num_parameters=stop.num_parameters,
            input_shape=stop.input_shape,
            output_shape=stop.output_shape,
            is_leaf=stop.is_leaf,
            is_trainable=stop.is_trainable,
            route=ways[0].get(stop.name, _NOWHERE),
            silent_where=traces[0].silent.get(stop.name, (0.0, ""))[1],
        )
        for stop, *metrics in zip(stops, *by_pass, strict=True)
    ]


def whole_model_issues(anatomy: ModelIndex, traces: Sequence[Trace], layers: Sequence[Layer]) -> list[Issue]:
    """No gradient anywhere, samples or units that are all the same, or layers that take no part in the loss."""
    detached = {layer.name for layer in layers if layer.route.is_detached}
    sizes: dict[str, int] = {}
    idle: dict[str, bool] = {}
    learns = False
    for named in anatomy.names.parameters.values():
        parameter = named.ref()
        if parameter is None or not parameter.requires_grad:
            continue
        grads = [grad for t in traces if (grad := t.get("grad", named.name)) is not None]
        learns = learns or any(grad.norm or grad.nonfinite for grad in grads)
        owner = named.owners[0]()
        name = named.owner if owner is not None and not owner._modules else named.name
        sizes[name] = sizes.get(name, 0) + parameter.numel()
        idle[name] = idle.get(name, True) and not grads and named.owner not in detached
    if sizes and not learns:
        return [without_gradient(sum(sizes.values()))]
    names = [name for name, is_idle in idle.items() if is_idle]
    collapsed = [] if most_wait(layers) else rank_collapse(traces[0].differences)
    found = [*collapsed, *symmetric(traces[0].likeness)]
    return [*found, *([unused(names, sum(sizes[name] for name in names) / sum(sizes.values()))] if names else [])]


def _near_output(leaves: Sequence[str], levels: Mapping[str, float], num: int = 3) -> float:
    """The median over the last third of the leaf modules, at least `num` of them: gradients come from there, so smaller
    ones nearer the input have vanished on the way, and larger ones have exploded."""
    found = [level for name in leaves if (level := levels.get(name, 0.0)) > 0]
    return median(found[-max(num, len(found) // 3) :]) if found else 0.0


def _relative(level: float, typical: float, is_known: bool) -> float:
    return level / typical if typical and level else 0.0 if is_known else 1.0


def _metrics(t: Trace, stops: Sequence[Stop], ways: Mapping[str, Route]) -> list[FlowMetrics]:
    """Metrics of every module, in one pass. Each is compared with the layers before the same gate."""
    acts, grads, weights, weight_grads = (t.sketches[kind] for kind in ("act", "actgrad", "param", "grad"))
    pressures = {name: grad.norm for name, grad in grads.items()}
    flows = {name: act.norm * pressures[name] for name, act in acts.items() if name in pressures}
    regions: dict[str, list[str]] = {}
    for stop in t.in_order():
        if stop.is_leaf:
            regions.setdefault(ways.get(stop.name, _NOWHERE).region, []).append(stop.name)
    typical = {}
    for region, leaves in regions.items():
        main = [name for name in leaves if ways.get(name, _NOWHERE).place is not None] or leaves
        num = 1 if len(main) < min(_MIN_MAIN, len(leaves)) else 3  # of a few, the others may be near the input
        typical[region] = _near_output(main, pressures, num), _near_output(main, flows, num)
    found = []
    for stop in stops:
        name = stop.name
        act, grad = acts.get(name, _NOTHING), grads.get(name, _NOTHING)
        is_known = name in grads
        pressure, flow = typical.get(ways.get(name, _NOWHERE).region, (0.0, 0.0))
        own = [weight_grads[p] for p in stop.parameters if p in weight_grads]
        found.append(
            FlowMetrics(
                mean_pressure=grad.mean_abs,
                max_pressure=grad.max_abs,
                turbulence=_turbulence(grad),
                relative_pressure=_relative(grad.norm, pressure, is_known),
                relative_flow=_relative(flows.get(name, 0.0), flow, is_known),
                grad_norm=grad.norm,
                activation_rms=act.rms,
                activation_zero_fraction=act.zero_fraction,
                silent_units=t.silent.get(name, (0.0, ""))[0],
                saturated=t.saturated.get(name, 0.0),
                weight_norm=_norm([weights[p] for p in stop.parameters if p in weights]),
                weight_grad_norm=_norm(own),
                nonfinite=grad.nonfinite + act.nonfinite + sum([sketch.nonfinite for sketch in own]),
                calls=stop.calls,
            )
        )
    return found


_MIN_MAIN: Final = 6
"""With fewer layers that everything passes, only the last one is near the output."""
_NOWHERE: Final = Route(is_connected=False, place=None)
"""Of a module whose output does not reach the loss, or reaches it where autograd does not show it."""
_NOTHING: Final = Sketch(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
"""For a module without a floating-point output, or without a gradient there."""


def _turbulence(grad: Sketch) -> float:
    if not grad.mean_abs:
        return 0.0
    variance = max(grad.rms**2 - grad.mean_abs**2, 0.0)
    return float(variance**0.5 / grad.mean_abs)


def _norm(sketches: list[Sketch]) -> float:
    return float(sum([s.norm**2 for s in sketches]) ** 0.5)


def _mean(passes: Sequence[FlowMetrics]) -> FlowMetrics:
    if len(passes) == 1:
        return passes[0]
    pressures = [m.mean_pressure for m in passes]
    changes = [abs(b - a) / a for a, b in pairwise(pressures) if a]
    values: dict[str, Any] = {
        name: fmean(getattr(m, name) for m in passes) for name in FlowMetrics.__dataclass_fields__
    }
    values |= {"velocity": fmean(changes) if changes else 0.0, "max_pressure": max(m.max_pressure for m in passes)}
    return FlowMetrics(**{**values, "nonfinite": sum(m.nonfinite for m in passes), "calls": passes[0].calls})
