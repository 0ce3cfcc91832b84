"""One training step of Keras, seen from inside: while TensorFlow or JAX trace it, or while torch runs it.

Sketches of what the optimizer is given and does leave with the step's own numbers. Whatever stands in a step here only
looks: what it returns is what the original returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import keras
from keras import ops

from sonde.probe.keras_backend import BACKEND, copied, dense, dtype, index, no_grad, place, scale_of
from sonde.probe.keras_names import KerasNames
from sonde.reduce.keras import Sketch, sketch, stack
from sonde.schema.records import Site
from sonde.session.session import Session

OURS: Final = "sonde"
"""Under this name sketches stand in what a training step returns, until they are taken out again."""


@dataclass
class _Step:
    """What one training step has shown so far; while it is traced, or while it runs."""

    place: Any
    number: Any = None
    depth: int = 0
    parts: list[tuple[Site, Sketch]] = field(default_factory=list)
    acts: list[tuple[Site, Sketch]] = field(default_factory=list)
    acts_place: Any = None
    seen: set[str] = field(default_factory=set)
    numbers: dict[str, Any] = field(default_factory=dict)


class InsideStep:
    """Stands in a model's training step, its optimizers and its layers; looks while `is_recording`."""

    def __init__(self, session: Session, model: Any, *, optim: bool, acts_arrived: Callable[..., None]) -> None:
        self.session, self.model, self.optim = session, model, optim
        self.names = KerasNames(model)
        self.sites: list[list[Site]] = []
        """Of each stack of sketches that was ever traced."""
        self.is_recording = False
        self._acts_arrived = acts_arrived
        self._step: _Step | None = None

    def train_step(self, original: Callable[..., Any], *args: Any) -> Any:
        if not self.is_recording:
            return original(*args)
        self._step = step = _Step(place())
        try:
            if BACKEND == "jax" and self.model.optimizer is not None:
                step.number = args[0][2][index(self.model.optimizer.variables, self.model.optimizer.iterations)]
            result = original(*args)
        finally:
            self._step = None
        logs, *state = result if BACKEND == "jax" else (result,)
        if not isinstance(logs, dict):
            return result
        found = self._guarded(self._together, step) or {}
        logs = {**logs, OURS: found} if found else logs
        return (logs, *state) if state else logs

    def _together(self, step: _Step) -> dict[str, Any]:
        groups = {str(self._note(part)): stack([s for _, s in part]) for part in (step.parts, step.acts) if part}
        return {**groups, **step.numbers}

    def _note(self, part: Sequence[tuple[Site, Sketch]]) -> int:
        sites = [site for site, _ in part]
        if sites not in self.sites:
            self.sites.append(sites)
        return self.sites.index(sites)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            with no_grad():
                return function(*args)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.session.breaker("keras", error)
            return None

    def update_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is not None and args and place() == step.place:
            step.numbers.setdefault("loss", ops.stop_gradient(args[0]))
        return original(*args, **kwargs)

    def apply(self, optimizer: Any, original: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> Any:
        """The optimizer of TensorFlow and torch."""
        step = self._step
        if step is None or place() != step.place:
            return original(grads, trainable_variables)
        grads = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        before = self._guarded(self._before, step, variables, grads, scale_of(optimizer))
        self._guarded(self._rate, step, optimizer)
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
        before = self._guarded(self._before, step, variables, grads, scale, values)
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, slots, strict=True))):
            self._guarded(self._rate, step, optimizer)
        new_values, new_slots = original(slots, grads, values)
        if before is not None:
            named = list(zip(optimizer.variables, new_slots, strict=True))
            self._guarded(self._after, step, variables, before, new_values, named)
        return new_values, new_slots

    def _rate(self, step: _Step, optimizer: Any) -> None:
        step.numbers.setdefault("optim/lr", ops.convert_to_tensor(optimizer.learning_rate))

    def _before(self, step: _Step, variables: Any, grads: Any, scale: Any, values: Any = None) -> list[Any]:
        kept = [copied(value) for value in (variables if values is None else values)]
        for variable, grad, value in zip(variables, grads, kept, strict=True):
            self._add(step, "param", variable, value)
            if grad is not None:
                grad = dense(grad)
                self._add(step, "grad", variable, grad if scale is None else grad / ops.cast(scale, grad.dtype))
        return kept

    def _after(self, step: _Step, variables: Any, before: Any, after: Any, slots: Any) -> None:
        for variable, old, new in zip(variables, before, after, strict=True):
            self._add(step, "update", variable, ops.convert_to_tensor(new) - old)
        if not self.optim:
            return
        # Keras names an optimizer's variable after the one it belongs to.
        prefixes = {variable.path.replace("/", "_") + "_": variable for variable in variables}
        for slot, value in slots:
            prefix = max((p for p in prefixes if slot.name.startswith(p)), key=len, default=None)
            if prefix is not None and tuple(slot.shape) == tuple(prefixes[prefix].shape):
                self._add(step, "optim", prefixes[prefix], ops.convert_to_tensor(value), f".{slot.name[len(prefix) :]}")

    def _add(self, step: _Step, kind: str, variable: Any, value: Any, ending: str = "") -> None:
        site = self.names.site_of(kind, variable, ending)
        if f"{kind}/{site.name}" not in step.seen:
            step.seen.add(f"{kind}/{site.name}")
            step.parts.append((site, sketch(value)))

    def call(self, site: str, type_name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None:
            return original(*args, **kwargs)
        is_outermost = step.depth == 0
        if is_outermost:
            step.acts_place = place()
        step.depth += 1
        try:
            outputs = original(*args, **kwargs)
        finally:
            step.depth -= 1
        self._guarded(self._called, step, site, type_name, outputs, is_outermost)
        return outputs

    def _called(self, step: _Step, site: str, type_name: str, outputs: Any, is_outermost: bool) -> None:
        """Of a layer that is called several times in a step, the first; inside a loop of the compiler, none."""
        is_reachable = BACKEND == "jax" or step.acts_place == step.place
        if is_reachable and place() == step.acts_place and site not in step.seen:
            step.seen.add(site)
            tensors = [x for x in keras.tree.flatten(outputs) if ops.is_tensor(x) and "float" in str(x.dtype)]
            for i, x in enumerate(tensors):
                name = site if len(tensors) == 1 else f"{site}.{i}"
                where = Site(kind="act", name=name, dtype=dtype(x), owner=site, module_type=type_name)
                step.acts.append((where, sketch(ops.stop_gradient(x))))
        if is_outermost and BACKEND == "jax" and step.acts:
            import jax

            # These are inside the function whose gradient is taken, and cannot be returned from it.
            arrived = functools.partial(self._acts_arrived, self._note(step.acts))
            jax.debug.callback(arrived, step.number, *stack([s for _, s in step.acts]))
            step.acts = []
