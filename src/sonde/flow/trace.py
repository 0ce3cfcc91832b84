"""One forward and one backward pass, with every module's output and its gradient sketched on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sonde.flow.batch import LossFunction, forward
from sonde.flow.fetch import fetch
from sonde.flow.graph import Graph, read_graph
from sonde.flow.route import Weight
from sonde.flow.sketch import Sketch, sketches_of
from sonde.flow.symmetry import differences, likeness
from sonde.flow.units import WATCHED, Units, UnitWatch
from sonde.probe.forward import ForwardTap
from sonde.probe.guards import quiet
from sonde.probe.loss.functional import CallTap
from sonde.probe.model import ModelNames, ModuleRef
from sonde.probe.outputs import floating_tensors, is_plain_tensor
from sonde.reduce.torch import Reducer, Table, resolve_all

Observer = Callable[..., None]
"""Called with (place, module, args, output) for every module call."""
Key = tuple[str, str]
"""(kind, name)"""


@dataclass(slots=True)
class Stop:
    """One module of the pass: its position in the forward order, and its inputs and outputs."""

    name: str
    type: str
    order: int
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    is_leaf: bool = True
    num_parameters: int = 0
    parameters: tuple[str, ...] = ()
    is_trainable: bool = False
    """Whether any of its parameters is trained."""
    calls: int = 0


@dataclass(slots=True)
class Trace:
    """The observations of one pass."""

    loss: float
    stops: dict[str, Stop]
    sketches: dict[str, dict[str, Sketch]]
    """By kind ("act", "actgrad", "param", "grad") and name."""
    silent: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Fraction of silent units and where they are, by module with a rectifier."""
    saturated: dict[str, float] = field(default_factory=dict)
    """Fraction of saturated values, by module with a sigmoid or tanh."""
    graph: Graph = field(default_factory=Graph)
    differences: list[tuple[str, float, float]] = field(default_factory=list)
    """Layer, variance of its outputs between samples and between tokens, in the order of the forward pass."""
    likeness: list[tuple[str, list[float]]] = field(default_factory=list)
    """Parameter, and how alike its units are."""

    def get(self, kind: str, name: str) -> Sketch | None:
        return self.sketches[kind].get(name)

    def weight_ratio(self, name: str) -> float:
        """Gradient over weight of a parameter."""
        weight, grad = self.get("param", name), self.get("grad", name)
        return grad.norm / weight.norm if weight is not None and grad is not None and weight.norm else 0.0

    def weights(self) -> dict[str, Weight]:
        """Every parameter, after the pass."""
        grads = self.sketches["grad"]
        return {
            name: Weight(sketch.rms, bool(grads[name].norm or grads[name].nonfinite) if name in grads else False)
            for name, sketch in self.sketches["param"].items()
        }

    def in_order(self) -> list[Stop]:
        return sorted(self.stops.values(), key=lambda stop: stop.order)


class _Collector:
    """The sink of the forward tap during one pass. Its work per module is the cost of an analysis on a GPU."""

    wants_activations = True
    wants_activation_grads = True
    is_idle = False

    def __init__(self, reducer: Reducer, units: UnitWatch, observers: Sequence[Observer]) -> None:
        self.reducer, self.units, self.observers = reducer, units, observers
        self.stops: dict[ModuleRef, Stop] = {}
        self.differences: dict[str, Tensor] = {}
        self.outputs: list[tuple[str, Any]] = []
        """Each module's name with the node of its output, in the order of the calls."""
        self.is_reentrant = False

    def forward_seen(self, place: ModuleRef, output: Any) -> None:
        # A module seen without gradients, in training, runs inside a reentrant checkpoint.
        self.is_reentrant = self.is_reentrant or not torch.is_grad_enabled()

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        stop = self.stops.get(place)
        if stop is None:
            shapes = _shape(args), _shape(output)
            stop = self.stops[place] = Stop(place.name, place.module_type, len(self.stops), *shapes)
        stop.calls += 1
        found = differences(module, output)
        if found is not None:
            self.differences[place.name] = found
        if isinstance(module, WATCHED):
            self.units.module_called(place, module, args, output)
        for observer in self.observers:
            observer(place, module, args, output)

    def activation(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        if tensor.grad_fn is not None:
            self.outputs.append((place.name, tensor.grad_fn))
            self.units.producers.setdefault(tensor.grad_fn, place.name)
        if not suffix:
            self.reducer.add(2 * self.stops[place].order, tensor)

    def activation_grad(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        if not suffix:
            self.reducer.add(2 * self.stops[place].order + 1, tensor)


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of the first floating-point tensor in a module's input or output."""
    first = value[0] if type(value) is tuple and value else value
    if type(first) is Tensor and first.dtype.is_floating_point and not first.is_meta:  # nearly always
        return first.shape
    found = floating_tensors(value)
    return found[0][1].shape if found else ()


def _sketch_weights(reducer: Reducer, first_key: int, owned: Sequence[tuple[str, nn.Parameter]]) -> list[Key]:
    """Sketch parameters and gradients. If both have the same layout, they share a plan.

    Returns the meaning of each key, in order."""
    weights = [(name, p) for name, p in owned if is_plain_tensor(p)]
    grads = [(name, p.grad) for name, p in owned if p.grad is not None and is_plain_tensor(p.grad)]
    keys = range(first_key, first_key + len(weights))
    grad_keys = range(keys.stop, keys.stop + len(grads))
    listed = reducer.list_for("param", keys, [tensor for _, tensor in weights])
    for table in listed.sketch([tensor for _, tensor in weights]):
        reducer.hold(table)
    if listed.odd or listed.empty or [_form(*item) for item in weights] != [_form(*item) for item in grads]:
        reducer.add_all("grad", grad_keys, [tensor for _, tensor in grads])
    else:
        for part in listed.parts:
            mine = [grads[i][1] for i in part.indices]
            reducer.hold(listed.table(part, part.read(mine), mine, None, np.array(grad_keys, np.int32)))
    return [*(("param", name) for name, _ in weights), *(("grad", name) for name, _ in grads)]


def _form(name: str, tensor: Tensor) -> tuple[object, ...]:
    return name, tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _describe(stop: Stop, names: ModelNames, module: nn.Module | None) -> None:
    """Facts that can be collected after the pass, when nothing waits for them."""
    assert module is not None  # the model holds it
    own = [(named.name, p) for p in module._parameters.values() if (named := names.parameter(p)) is not None]
    stop.is_leaf = not module._modules
    stop.num_parameters = sum(p.numel() for _, p in own if p is not None)
    stop.is_trainable = any(p is not None and p.requires_grad for _, p in own)
    stop.parameters = tuple(name for name, _ in own)  # a tied one under its first name
    stop.input_shape, stop.output_shape = tuple(stop.input_shape), tuple(stop.output_shape)


@dataclass(slots=True)
class PassResult:
    """A pass whose numbers may still be being copied from the device. Only `trace` waits for them."""

    names: ModelNames
    loss: Tensor
    stops: dict[str, Stop]
    keys: list[Key]
    tables: list[Table]
    units: Units
    graph: Graph
    differences: dict[str, Tensor]
    likeness: dict[str, Tensor]

    def trace(self) -> Trace:
        with quiet():
            # First, since torch's own wait for a device is faster than polling for numbers.
            loss = float(self.loss)
            self.graph.cut_unused()
            sketches, shares = _resolve(self.keys, self.tables), self.units.shares()
            numbers = fetch([*self.differences.values(), *self.likeness.values()])
            apart = [(name, pair[0], pair[1]) for name, pair in zip(self.differences, numbers, strict=False)]
            alike = list(zip(self.likeness, numbers[len(apart) :], strict=True))
            return Trace(loss, self.stops, sketches, *shares, self.graph, apart, alike)


def run_pass(
    model: nn.Module,
    x: Any,
    y: Any,
    loss_fn: LossFunction | None,
    *,
    names: ModelNames,
    observers: Sequence[Observer] = (),
    everywhere: bool = False,
) -> PassResult:
    """Run the pass. Call it inside `preserved`. `observers` are called for every module call, like the hooks.

    `everywhere`: also compute gradients along other paths than those to the model's parameters."""
    units = UnitWatch()
    collector = _Collector(Reducer(hist_samples=1, on_unreadable=lambda *_: None), units, observers)
    errors: list[Exception] = []
    calls = CallTap(names, units, lambda _, error: errors.append(error), only=units.functions)
    tap = ForwardTap(names, collector, lambda _, error: errors.append(error))
    try:
        calls.open()
        _, loss = forward(model, x, y, loss_fn)
        calls.close()
        shapes = {
            key: (named.name, tuple(p.shape))
            for key, named in names.parameters.items()
            if (p := named.ref()) is not None
        }
        graph = read_graph(loss, collector.outputs, units.detached, shapes)
        collector.outputs.clear()
        units.producers.clear()
        units.detached.clear()
        _backward(loss, model, everywhere=everywhere or collector.is_reentrant or _wants_grad(x))
    finally:
        calls.close()
        tap.detach()
    if errors:
        raise errors[0]
    return _passed(names, loss, collector, units, graph)


def _passed(names: ModelNames, loss: Tensor, collector: _Collector, units: UnitWatch, graph: Graph) -> PassResult:
    """Everything that can be done while a GPU is still working on the pass."""
    reducer = collector.reducer
    owned = [(named.name, p) for named in names.parameters.values() if (p := named.ref()) is not None]
    keys = [(kind, place.name) for place in collector.stops for kind in ("act", "actgrad")]
    with quiet():
        keys += _sketch_weights(reducer, len(keys), owned)
        tables = reducer.take()
        reducer.forget()
        together = units.together()
        alike = {name: found for name, p in owned if p.grad is not None and (found := _likeness(p)) is not None}
    for place, stop in collector.stops.items():
        _describe(stop, names, place.ref())
    stops = {stop.name: stop for stop in collector.stops.values()}
    return PassResult(names, loss.detach(), stops, keys, tables, together, graph, collector.differences, alike)


def _likeness(parameter: nn.Parameter) -> Tensor | None:
    grad = parameter.grad
    return (
        likeness(parameter, grad) if is_plain_tensor(parameter) and is_plain_tensor(grad) and grad is not None else None
    )


def _backward(loss: Tensor, model: nn.Module, *, everywhere: bool) -> None:
    """Gradients of the model's own parameters, and of nothing else.

    `everywhere`: not only along the paths to them. An analyzer may have added others, a batch may require a gradient,
    and a reentrant checkpoint rejects a backward pass along some paths only.
    """
    if not loss.requires_grad:
        return  # nothing gets a gradient, which is the verdict
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if own and not everywhere:
        # torch skips other leaves by itself, faster than we could search for them.
        loss.backward(inputs=own)  # type: ignore[no-untyped-call]
        return
    with foreign_grads_kept(loss, model.parameters()):
        loss.backward()  # type: ignore[no-untyped-call]


def _wants_grad(x: Any) -> bool:
    return any(tensor.requires_grad for _, tensor in floating_tensors(x))


@contextmanager
def foreign_grads_kept(loss: Tensor, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients of all but these stay as they were: of the inputs, of a discriminator inside the loss."""
    own = {id(parameter) for parameter in parameters}
    foreign = [(leaf, leaf.grad) for leaf in _leaves(loss) if id(leaf) not in own]
    for leaf, _ in foreign:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, grad in foreign:
            leaf.grad = grad


def _leaves(loss: Tensor) -> list[Tensor]:
    """Every tensor that a backward pass would give a gradient."""
    found: list[Tensor] = []
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _resolve(keys: list[Key], tables: list[Table]) -> dict[str, dict[str, Sketch]]:
    numbers, rows, _, _ = resolve_all(tables)
    found: dict[str, dict[str, Sketch]] = {"act": {}, "actgrad": {}, "param": {}, "grad": {}}
    for number, sketch in zip(numbers.tolist(), sketches_of(rows), strict=True):
        kind, name = keys[number]
        found[kind][name] = sketch
    return found
