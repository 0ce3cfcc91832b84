"""One forward and one backward pass, with every module's output and its gradient sketched on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sonde.flow.batch import LossFunction, forward
from sonde.flow.units import UnitWatch
from sonde.probe.forward import ForwardTap
from sonde.probe.functional import CallTap
from sonde.probe.guards import quiet
from sonde.probe.model import ModelNames, Place
from sonde.probe.outputs import floating_tensors, is_plain_tensor
from sonde.reduce.torch import Reducer, Table, resolve_all
from sonde.schema.sketch import INF, MAX, MIN, NAN, SUMABS, SUMSQ, ZERO, N


@dataclass(slots=True)
class Stop:
    """One module on the way: its place in the order of the forward pass, and what it took and gave."""

    name: str
    type: str
    order: int
    is_leaf: bool = True
    num_parameters: int = 0
    parameters: tuple[str, ...] = ()
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    is_trainable: bool = False
    """Whether any of its parameters learns."""
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Sketch:
    """The numbers of one tensor that the analysis needs."""

    n: float
    mean_abs: float
    max_abs: float
    norm: float
    rms: float
    zero_fraction: float
    nonfinite: int

    @staticmethod
    def of(row: Sequence[float]) -> Sketch:
        n = row[N]
        finite = n - row[NAN] - row[INF]
        if finite <= 0:
            return Sketch(n, 0.0, 0.0, math.sqrt(row[SUMSQ]), 0.0, row[ZERO] / n if n else 0.0, int(n))
        return Sketch(
            n=n,
            mean_abs=row[SUMABS] / finite,
            max_abs=max(abs(row[MIN]), abs(row[MAX])),
            norm=math.sqrt(row[SUMSQ]),
            rms=math.sqrt(row[SUMSQ] / finite),
            zero_fraction=row[ZERO] / n,
            nonfinite=int(n - finite),
        )


@dataclass(slots=True)
class Trace:
    """What one pass saw. Sketches by kind ("act", "actgrad", "param", "grad") and name."""

    loss: float
    stops: dict[str, Stop]
    sketches: dict[tuple[str, str], Sketch]
    silent: dict[str, float] = field(default_factory=dict)
    """Share of silent units, by module with a rectifier."""
    saturated: dict[str, float] = field(default_factory=dict)
    """Share of saturated values, by module with a sigmoid or tanh."""

    def get(self, kind: str, name: str) -> Sketch | None:
        return self.sketches.get((kind, name))

    def weight_ratio(self, name: str) -> float:
        """Gradient over weight of a parameter."""
        weight, grad = self.get("param", name), self.get("grad", name)
        return grad.norm / weight.norm if weight is not None and grad is not None and weight.norm else 0.0

    def in_order(self) -> list[Stop]:
        return sorted(self.stops.values(), key=lambda stop: stop.order)


class _Collector:
    """The sink of the forward tap during one pass."""

    wants_activations = True
    wants_activation_grads = True

    def __init__(self, names: ModelNames, reducer: Reducer) -> None:
        self.names, self.reducer = names, reducer
        self.stops: dict[str, Stop] = {}
        self.modules: dict[str, nn.Module] = {}
        self.keys: dict[tuple[str, str], int] = {}
        self.is_reentrant = False
        self.observers: list[Any] = []
        """Called with (place, module, args, output) for every module call; see `trace`."""

    def key(self, kind: str, name: str) -> int:
        return self.keys.setdefault((kind, name), len(self.keys))

    def forward_seen(self) -> None:
        # Seen without gradients, in training, is what runs inside a reentrant checkpoint.
        self.is_reentrant = self.is_reentrant or not torch.is_grad_enabled()

    def module_called(self, place: Place, module: nn.Module, args: Any, output: Any) -> None:
        stop = self.stops.get(place.name)
        if stop is None:
            stop = self.stops[place.name] = _stop(place, len(self.stops), args, output)
            self.modules[place.name] = module
        stop.calls += 1
        for observer in self.observers:
            observer(place, module, args, output)

    def activation(self, place: Place, suffix: str, tensor: Tensor) -> None:
        if not suffix:
            self.reducer.add(self.key("act", place.name), tensor, histogram=False)

    def activation_grad(self, place: Place, suffix: str, tensor: Tensor) -> None:
        if not suffix:
            self.reducer.add(self.key("actgrad", place.name), tensor, histogram=False)


def _stop(place: Place, order: int, args: Any, output: Any) -> Stop:
    taken, given = floating_tensors(args), floating_tensors(output)
    return Stop(
        name=place.name,
        type=place.module_type,
        order=order,
        input_shape=tuple(taken[0][1].shape) if taken else (),
        output_shape=tuple(given[0][1].shape) if given else (),
    )


def _sketch_weights(collector: _Collector, names: ModelNames, model: nn.Module) -> None:
    """Parameters and gradients. Where both look alike, what was planned for the ones serves the others."""
    weights, grads = list(_parameters(names, model)), list(_grads(names, model))
    reducer = collector.reducer
    keys = [collector.key("param", name) for name, _ in weights]
    listed = reducer.list_for("param", keys, [tensor for _, tensor in weights])
    for table in listed.sketch([tensor for _, tensor in weights]):
        reducer.hold(table)
    grad_keys = [collector.key("grad", name) for name, _ in grads]
    if listed.odd or listed.empty or [_form(*item) for item in weights] != [_form(*item) for item in grads]:
        reducer.add_all("grad", grad_keys, [tensor for _, tensor in grads])
        return
    for part in listed.parts:
        mine = [grads[i][1].detach() for i in part.indices]
        part.prepare(mine)
        reducer.hold(listed.table(part, mine, None, np.array(grad_keys, np.int32)))


def _form(name: str, tensor: Tensor) -> tuple[object, ...]:
    return name, tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _describe(stop: Stop, names: ModelNames, module: nn.Module) -> None:
    """What can be told after the pass, when nothing waits for it."""
    own = [(named.name, p) for p in module._parameters.values() if (named := names.parameter(p)) is not None]
    stop.is_leaf = not module._modules
    stop.num_parameters = sum(p.numel() for _, p in own if p is not None)
    stop.is_trainable = any(p is not None and p.requires_grad for _, p in own)
    stop.parameters = tuple(name for name, _ in own)  # a tied one under the name it has first


@dataclass(slots=True)
class Passed:
    """A pass whose numbers may still be on their way from the device. Only `trace` waits for them."""

    loss: Tensor
    collector: _Collector
    tables: list[Table]
    units: UnitWatch

    def trace(self) -> Trace:
        with quiet():
            sketches = _resolve(self.collector, self.tables)
            loss = float(self.loss)
            return Trace(
                loss, self.collector.stops, sketches, self.units.silent_shares(), self.units.saturated_shares()
            )


def run_pass(
    model: nn.Module, x: Any, y: Any, loss_fn: LossFunction | None, *, observers: tuple[Any, ...] = ()
) -> Passed:
    """Run it. To be called inside `preserved`. `observers` are called for every module call, as the hooks are."""
    names = ModelNames(model)
    collector = _Collector(names, Reducer(hist_samples=1, on_unreadable=lambda *_: None))
    units = UnitWatch()
    collector.observers.extend((units.module_called, *observers))
    errors: list[Exception] = []
    calls = CallTap(names, units, lambda _, error: errors.append(error))
    tap = ForwardTap(names, collector, lambda _, error: errors.append(error))
    try:
        calls.open()
        _, loss = forward(model, x, y, loss_fn)
        calls.close()
        _backward(loss, model, everywhere=bool(observers) or collector.is_reentrant or _wants_grad(x))
    finally:
        calls.close()
        tap.detach()
    if errors:
        raise errors[0]
    with quiet():
        _sketch_weights(collector, names, model)
        tables = collector.reducer.take()
        collector.reducer.forget()
    for name, module in collector.modules.items():
        _describe(collector.stops[name], names, module)
    return Passed(loss.detach(), collector, tables, units)


def _backward(loss: Tensor, model: nn.Module, *, everywhere: bool) -> None:
    """Gradients of the model's own parameters, and of nothing else's.

    `everywhere`: not only along the ways to them. An observer may have laid others, a batch may want a gradient, and a
    reentrant checkpoint refuses to go along some ways only.
    """
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if own and not everywhere:
        # torch leaves other leaves alone by itself, and faster than by looking for them.
        loss.backward(inputs=own)  # type: ignore[no-untyped-call]
        return
    with _foreign_grads_kept(loss, model):
        loss.backward()  # type: ignore[no-untyped-call]


def _wants_grad(x: Any) -> bool:
    return any(tensor.requires_grad for _, tensor in floating_tensors(x))


@contextmanager
def _foreign_grads_kept(loss: Tensor, model: nn.Module) -> Iterator[None]:
    """Gradients of what is not the model's stay as they were: of the inputs, of a discriminator inside the loss."""
    own = {id(parameter) for parameter in model.parameters()}
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


def _parameters(names: ModelNames, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for parameter in model.parameters():
        named = names.parameter(parameter)
        if named is not None and is_plain_tensor(parameter):
            yield named.name, parameter


def _grads(names: ModelNames, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for parameter in model.parameters():
        named = names.parameter(parameter)
        if named is not None and parameter.grad is not None and is_plain_tensor(parameter.grad):
            yield named.name, parameter.grad


def _resolve(collector: _Collector, tables: list[Table]) -> dict[tuple[str, str], Sketch]:
    keys, rows, _, _ = resolve_all(tables)
    name_of = {number: name for name, number in collector.keys.items()}
    # As Python's numbers: numpy's, one at a time, take ten times as long.
    return {name_of[key]: Sketch.of(row) for key, row in zip(keys.tolist(), rows.tolist(), strict=True)}
