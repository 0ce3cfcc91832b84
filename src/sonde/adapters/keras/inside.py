"""One Keras training step, observed from inside: while TensorFlow or JAX trace it, or while torch runs it.

Sketches of the optimizer's inputs and effects are returned with the step's own numbers. Our wrappers only observe: they
return what the original returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import keras
from keras import ops

from sonde.adapters.keras.backend import (
    BACKEND,
    clipped,
    copied,
    dense,
    dtype,
    index,
    is_compiled,
    no_grad,
    optimizers,
    place,
    scale_of,
)
from sonde.adapters.keras.collected import Collected, Collector
from sonde.adapters.keras.names import KerasNames
from sonde.adapters.keras.structure import constants_of, rectified_axis
from sonde.schema.records import Site
from sonde.session.session import Session

OURS: Final = "sonde"
"""The key of the sketches in the result of a training step, until they are removed again."""
WHOLE: Final = "whole "
"""The beginning of the names of whole tensors among the results of a step."""


@dataclass(frozen=True)
class Keeping:
    """The tensors of a snapshot that only the step itself has."""

    kinds: frozenset[str]
    wants: Callable[[str, Any], bool]


@dataclass
class _Step:
    """The observations of one training step so far; while it is traced, or while it runs."""

    place: Any
    parts: Collected
    acts: Collected
    number: Any = None
    depth: int = 0
    acts_place: Any = None
    seen: set[str] = field(default_factory=set)
    numbers: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    """Whole tensors for a snapshot, by name."""


class InsideStep:
    """Wraps a model's training step, its optimizers and its layers; observes while `is_recording`."""

    def __init__(self, session: Session, model: Any, *, optim: bool, acts_arrived: Callable[..., None]) -> None:
        self.session, self.model, self.optim = session, model, optim
        self.names = KerasNames(model)
        self.collector = Collector(session, is_compiled=is_compiled(model))
        self.is_recording = False
        self.keeping: Keeping | None = None
        """The whole tensors that the current step returns, in addition to its sketches."""
        self.settings: dict[str, float] = {}
        """The other numbers of the optimizers, by the names they are recorded under."""
        self._optimizers = optimizers(model)
        self.calls: dict[str, tuple[int, int]] = {}
        """For each layer: its position among the calls of a step, and their number."""
        self._acts_arrived = acts_arrived
        self._step: _Step | None = None

    def train_step(self, original: Callable[..., Any], *args: Any) -> Any:
        if not self.is_recording:
            return original(*args)
        self._step = step = _Step(place(), self.collector.begin(), self.collector.begin())
        try:
            if BACKEND == "jax" and self.model.optimizer is not None:
                step.number = args[0][2][index(self.model.optimizer.variables, self.model.optimizer.iterations)]
            self._guarded(self._keep_batch, step, args[-1])
            result = original(*args)
        finally:
            self._step = None
        self.calls = self.calls or step.calls
        logs, *state = result if BACKEND == "jax" else (result,)
        if not isinstance(logs, dict):
            return result
        found = self._guarded(self._together, step) or {}
        logs = {**logs, OURS: found} if found else logs
        return (logs, *state) if state else logs

    def _together(self, step: _Step) -> dict[str, Any]:
        sketches = {**self.collector.sketched(step.parts), **self.collector.sketched(step.acts)}
        return {**sketches, **step.numbers, **step.whole}

    def _keep_batch(self, step: _Step, data: Any) -> None:
        if self.keeping is not None and "batch" in self.keeping.kinds:
            inputs = keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(data)[0])
            self._keep(step, [(f"batch/input.{i}", x) for i, x in enumerate(inputs) if ops.is_tensor(x)])

    def _keep(self, step: _Step, named: Sequence[tuple[str, Any]], owner: Any = None) -> None:
        """Return these tensors with the step's numbers, if they are part of a snapshot."""
        assert self.keeping is not None
        for name, value in named:
            key = f"{WHOLE}{name}"
            if self.keeping.wants(name, owner) and key not in step.whole:
                step.whole[key] = copied(value)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            with no_grad(), self.collector.timed():
                return function(*args)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.session.recording.breaker("keras", error)
            return None

    def update_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is not None and args and place() == step.place:
            step.numbers.setdefault("loss", ops.stop_gradient(args[0]))
        return original(*args, **kwargs)

    # -------------------------------------------------------------------------------------------------------- optimizer

    def apply(self, optimizer: Any, original: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> Any:
        """The optimizer of TensorFlow and torch."""
        step = self._step
        if step is None or place() != step.place:
            return original(grads, trainable_variables)
        grads = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        before = self._guarded(self._before, step, optimizer, variables, grads, scale_of(optimizer))
        self._guarded(self._settings, step, optimizer)
        result = original(grads, variables)
        if before is not None:
            slots = list(zip(optimizer.variables, optimizer.variables, strict=True))
            self._guarded(self._after, step, variables, before, variables, slots)
        return result

    def stateless_apply(self, optimizer: Any, original: Callable[..., Any], slots: Any, grads: Any, values: Any) -> Any:
        """The optimizer of JAX."""
        step = self._step
        if step is None or place() != step.place:
            return original(slots, grads, values)
        variables, scale = optimizer._trainable_variables, scale_of(optimizer)
        if isinstance(scale, keras.Variable):
            scale = slots[index(optimizer.variables, scale)]
        before = self._guarded(self._before, step, optimizer, variables, grads, scale, values)
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, slots, strict=True))):
            self._guarded(self._settings, step, optimizer)
        new_values, new_slots = original(slots, grads, values)
        if before is not None:
            named = list(zip(optimizer.variables, new_slots, strict=True))
            self._guarded(self._after, step, variables, before, new_values, named)
        return new_values, new_slots

    def _settings(self, step: _Step, optimizer: Any) -> None:
        """The learning rate is returned with the step; a Python number is part of the compiled step."""
        number = index(self._optimizers, optimizer)
        place = f"optim/{number}" if number else "optim"
        step.numbers.setdefault(f"{place}/lr", ops.convert_to_tensor(optimizer.learning_rate))
        self.settings.update((f"{place}/{name}", value) for name, value in constants_of(optimizer))

    def _before(
        self, step: _Step, optimizer: Any, variables: Any, grads: Any, scale: Any, values: Any = None
    ) -> list[Any]:
        kept = [copied(value) for value in (variables if values is None else values)]
        self._add(step, "param", variables, kept)
        having = [(variable, dense(grad)) for variable, grad in zip(variables, grads, strict=True) if grad is not None]
        plain = [grad if scale is None else grad / ops.cast(scale, grad.dtype) for _, grad in having]
        used = clipped(optimizer, plain)
        owners = [variable for variable, _ in having]
        self._add(step, "grad", owners, plain if used is None else used, raws=None if used is None else plain)
        if self.keeping is not None and "grad" in self.keeping.kinds:
            for variable, grad in zip(owners, plain if used is None else used, strict=True):
                name = f"grad/{self.names.site_of('grad', variable).name}"
                self._keep(step, [(name, grad)], self.names.owner_of(variable))
        return kept

    def _after(self, step: _Step, variables: Any, before: Any, after: Any, slots: Any) -> None:
        moved = [ops.convert_to_tensor(new) - old for old, new in zip(before, after, strict=True)]
        self._add(step, "update", variables, moved)
        if not self.optim:
            return
        # Keras names an optimizer's variable after the one it belongs to.
        prefixes = {variable.path.replace("/", "_") + "_": variable for variable in variables}
        owners, values, endings = [], [], []
        for slot, value in slots:
            prefix = max((p for p in prefixes if slot.name.startswith(p)), key=len, default=None)
            if prefix is not None and tuple(slot.shape) == tuple(prefixes[prefix].shape):
                owners.append(prefixes[prefix])
                values.append(ops.convert_to_tensor(value))
                endings.append(f".{slot.name[len(prefix) :]}")
        self._add(step, "optim", owners, values, endings)

    def _add(
        self,
        step: _Step,
        kind: str,
        variables: Sequence[Any],
        values: Sequence[Any],
        endings: Sequence[str] = (),
        raws: Sequence[Any] | None = None,
    ) -> None:
        sites = [
            self.names.site_of(kind, v, e) for v, e in zip(variables, endings or [""] * len(variables), strict=True)
        ]
        new = [i for i, site in enumerate(sites) if f"{kind}/{site.name}" not in step.seen]
        step.seen.update(f"{kind}/{sites[i].name}" for i in new)
        step.parts.add(
            [sites[i] for i in new], [values[i] for i in new], None if raws is None else [raws[i] for i in new]
        )

    # ----------------------------------------------------------------------------------------------------------- layers

    def call(self, site: str, layer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None:
            return original(*args, **kwargs)
        is_outermost = step.depth == 0
        if is_outermost:
            step.acts_place = place()
        step.depth += 1
        order, num = step.calls.get(site, (len(step.calls), 0))
        step.calls[site] = order, num + 1
        try:
            outputs = original(*args, **kwargs)
        finally:
            step.depth -= 1
        self._guarded(self._called, step, site, layer, outputs, is_outermost)
        return outputs

    def _called(self, step: _Step, site: str, layer: Any, outputs: Any, is_outermost: bool) -> None:
        """For a layer that is called several times in a step, the first call; inside a compiled loop, none."""
        is_reachable = BACKEND == "jax" or step.acts_place == step.place
        if is_reachable and place() == step.acts_place and site not in step.seen:
            step.seen.add(site)
            tensors = [x for x in keras.tree.flatten(outputs) if ops.is_tensor(x) and "float" in str(x.dtype)]
            names = [site if len(tensors) == 1 else f"{site}.{i}" for i in range(len(tensors))]
            act = functools.partial(Site, kind="act", owner=site, module_type=type(layer).__name__)
            sites = [act(name=name, dtype=dtype(x)) for name, x in zip(names, tensors, strict=True)]
            values = [ops.stop_gradient(x) for x in tensors]
            step.acts.add(sites, values)
            if self.keeping is not None and "act" in self.keeping.kinds:
                self._keep(step, [(f"act/{name}", x) for name, x in zip(names, values, strict=True)], layer)
            axis = rectified_axis(layer)
            if axis is not None and len(values) == 1 and len(values[0].shape) > 1:
                step.acts.add_units(site, values[0], axis)
        if is_outermost and BACKEND == "jax" and step.acts:
            import jax

            # These are inside the differentiated function, and cannot be returned from it.
            acts = {name: step.whole.pop(name) for name in [*step.whole] if name.startswith(f"{WHOLE}act/")}
            found = {**self.collector.sketched(step.acts), **acts}
            arrived = functools.partial(self._acts_arrived, list(found))
            jax.debug.callback(arrived, step.number, *found.values())
            step.acts = self.collector.begin()
