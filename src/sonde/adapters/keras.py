"""Keras 3 on TensorFlow, JAX or torch: one callback records `fit`, with the gradients that the optimizer is given.

    model.fit(x, y, callbacks=[SondeCallback(project="mnist")])

While `fit` runs, the model's training function is one that returns sketches beside its numbers, compiled like Keras's
own; what was there before comes back afterwards, however `fit` ends. Nothing is waited for.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sonde.errors import MissingPackageError

try:
    import keras
except ImportError as error:
    raise MissingPackageError("keras", "keras", "SondeCallback") from error

from keras import ops

from sonde.probe.schedule import ALWAYS, as_schedule
from sonde.reduce.keras import Sketch, sketch, stack, to_rows
from sonde.schema.names import site_name
from sonde.schema.records import Site
from sonde.session import NullSession, Session
from sonde.session.handed import put_rows, put_scalars
from sonde.session.joining import Joining

_BACKEND: Final = keras.backend.backend()
_OURS: Final = "sonde"
"""Under this name sketches stand in what a training step returns, until they are taken out again."""
_END_OF_DATA: Final = ("StopIteration", "OutOfRangeError")


class SondeCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Records `fit`. A session given, or begun before, is used and left open; else one is begun.

    `SondeCallback(project="mnist", activations=False, when=every(10))`: `when` is a schedule as in `sonde.watch`; on
    the steps it leaves out Keras's own training function runs. All others are options of `sonde.init`. Used for
    another `fit`, it goes on with the same run.
    """

    def __init__(
        self,
        session: Session | NullSession | None = None,
        *,
        activations: bool = True,
        optim: bool = True,
        when: Any = True,
        **init: Any,
    ) -> None:
        super().__init__()
        self._activations, self._optim = activations, optim
        self._when = as_schedule(when, default=ALWAYS, argument="when")
        self._joining = Joining(session, init)
        self._recorder: _Recorder | None = None
        self._left: Any = None

    @property
    def session(self) -> Session | NullSession | None:
        """What is recorded to, once training has begun."""
        return self._joining.session

    def on_train_begin(self, logs: Any = None) -> None:
        self.failed(None)  # what an earlier `fit` that nobody saw the end of has left
        model, before = self.model, self.session
        resume = before.path if isinstance(before, Session) else None
        session = self._joining.begin(_config(model, self.params or {}), resume=resume)
        if not isinstance(session, Session):
            return
        iterations = 0 if model.optimizer is None else int(ops.convert_to_numpy(model.optimizer.iterations))
        if iterations and resume is None:
            self._joining.continue_at(iterations)
        try:
            self._recorder = _Recorder(self, session, model, iterations)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            session.breaker("keras", error)
            return
        session.on_finish(self._recorder.restore)
        # Keras tells nobody that `fit` has failed. Its list of callbacks goes away with it.
        inside = sys._getframe(1).f_locals.get("self")
        if isinstance(inside, keras.callbacks.CallbackList):
            self._left = weakref.finalize(inside, _left, weakref.ref(self), weakref.ref(self._recorder))
            self._left.atexit = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._recorder is not None:
            self._recorder.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """What was validated, at the last step of the epoch. The others are recorded as they come."""
        if isinstance(self.session, Session):
            values = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
            self.session.log(values, step=max(self.session.step_number - 1, 0))

    def on_train_end(self, logs: Any = None) -> None:
        self._end(None)

    def failed(self, error: BaseException | None) -> None:
        """`fit` has ended without `on_train_end`."""
        if self._recorder is not None:
            self._end(error or RuntimeError("fit did not come to its end"))

    def _end(self, error: BaseException | None) -> None:
        recorder, self._recorder = self._recorder, None
        if self._left is not None:
            self._left.detach()
        if recorder is not None:
            recorder.restore()
            if _BACKEND == "jax":
                import jax

                jax.effects_barrier()  # activations that are on their way
        self._joining.end(error)


TracerCallback = SondeCallback


def _left(callback: weakref.ref[SondeCallback], recorder: weakref.ref[_Recorder]) -> None:
    known = callback()
    if known is not None and known._recorder is not None and known._recorder is recorder():
        known.failed(sys.exc_info()[1])


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
    loss: Any = None


class _Recorder:
    """Stands in a model's training function, its optimizer and its layers for as long as one `fit` lasts."""

    def __init__(self, callback: SondeCallback, session: Session, model: Any, iterations: int) -> None:
        self.callback, self.session, self.model, self.batch = weakref.proxy(callback), session, model, 0
        self.when, self.optim = callback._when, callback._optim
        self._names = _named(model)
        self._offset = session.step_number - iterations
        self._sites: list[list[Site]] = []
        """Of each stack of sketches that was ever traced."""
        self._step: _Step | None = None
        self._is_recording = False
        self._is_seen = False
        self._undo: list[Callable[[], None]] = []
        if _num_replicas(model) > 1:
            session.warn_once("keras replicas", "under tf.distribute only the numbers in the logs are recorded.")
        try:
            self._attach(model, callback._activations)
        except BaseException:
            self.restore()
            raise

    def _attach(self, model: Any, activations: bool) -> None:
        plain = model.train_function
        self._undo.append(lambda: setattr(model, "train_function", plain))
        self._wrap(model, "train_step", self._train_step)
        if model.optimizer is not None:
            name = "stateless_apply" if _BACKEND == "jax" else "apply"
            self._wrap(model.optimizer, name, self._stateless_apply if _BACKEND == "jax" else self._apply)
        if getattr(model, "_loss_tracker", None) is not None:
            self._wrap(model._loss_tracker, "update_state", self._update_state)
        for layer, site in self._names.layers if activations else ():
            self._wrap(layer, "call", functools.partial(self._call, site, type(layer).__name__))
        model.make_train_function(force=True)
        model.train_function = functools.partial(self._train_function, plain, model.train_function)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """On the instance, past Keras's own bookkeeping of attributes."""
        own, original = vars(owner).get(name), getattr(owner, name)
        vars(owner)[name] = functools.wraps(original)(functools.partial(wrapper, original))
        self._undo.append(lambda: vars(owner).pop(name, None) if own is None else vars(owner).update({name: own}))

    def restore(self) -> None:
        """Everything as it was before; asked again, nothing."""
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------------------------------- outside the compiler

    def _train_function(self, plain: Callable[..., Any], recording: Callable[..., Any], *args: Any) -> Any:
        session = self.session
        if session.is_finished or session.breaker.is_open:
            return plain(*args)
        skipped = self._steps() - 1
        self._is_recording = self.when(session.step_number + skipped) and _num_replicas(self.model) == 1
        try:
            result = (recording if self._is_recording else plain)(*args)
        except BaseException as error:
            if type(error).__name__ not in _END_OF_DATA:
                self.callback.failed(error)
            raise
        finally:
            self._is_recording, was_recording = False, self._is_recording
        logs, *state = result if _BACKEND == "jax" else (result,)
        found = logs.pop(_OURS, None) if isinstance(logs, dict) else None
        try:
            self._hand_over(logs, found, skipped, was_recording)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            session.breaker("keras", error)
        session.step()
        return (logs, *state) if state else logs

    def _steps(self) -> int:
        """How many steps one call of the training function makes."""
        num = int(self.model.steps_per_execution)
        if num > 1:
            self.session.warn_once(
                "keras execution", f"steps_per_execution={num}: of each {num} steps the last one is recorded."
            )
        total = (self.callback.params or {}).get("steps")
        return max(min(num, total - self.batch), 1) if total else num

    def _hand_over(self, logs: Any, found: Mapping[str, Any] | None, skipped: int, was_recording: bool) -> None:
        session = self.session
        for _ in range(skipped):
            session.step()
        numbers = dict(logs) if isinstance(logs, Mapping) else {}
        if found is None and was_recording and not self._is_seen:
            session.warn_once("keras unseen", "this model's training step shows no gradients; its logs are recorded.")
        for key, value in (found or {}).items():
            self._is_seen = True
            if key == "loss":
                numbers["loss"] = value  # of this batch; the one in the logs is a mean since the epoch began
            else:
                put_rows(session, self._sites[int(key)], functools.partial(to_rows, *value))
        flat = {name: _kept(value) for name, value in _flat(numbers)}
        if flat:
            put_scalars(session, flat)

    def _acts_arrived(self, key: int, number: Any, counts: Any, sums: Any) -> None:
        """On a thread of JAX's."""
        try:
            put_rows(
                self.session, self._sites[key], functools.partial(to_rows, counts, sums), step=int(number) + self._offset
            )
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.session.breaker("keras activations", error)

    # --------------------------------------------------------------------------------------------- inside the compiler

    def _train_step(self, original: Callable[..., Any], *args: Any) -> Any:
        if not self._is_recording:
            return original(*args)
        self._step = step = _Step(_place())
        try:
            if _BACKEND == "jax" and self.model.optimizer is not None:
                step.number = args[0][2][_index(self.model.optimizer.variables, self.model.optimizer.iterations)]
            result = original(*args)
        finally:
            self._step = None
        logs, *state = result if _BACKEND == "jax" else (result,)
        if not isinstance(logs, dict):
            return result
        found = self._guarded(self._together, step) or {}
        logs = {**logs, _OURS: found} if found else logs
        return (logs, *state) if state else logs

    def _together(self, step: _Step) -> dict[str, Any]:
        groups = {str(self._note(part)): stack([s for _, s in part]) for part in (step.parts, step.acts) if part}
        return groups | ({} if step.loss is None else {"loss": step.loss})

    def _note(self, part: Sequence[tuple[Site, Sketch]]) -> int:
        sites = [site for site, _ in part]
        if sites not in self._sites:
            self._sites.append(sites)
        return self._sites.index(sites)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            with _no_grad():
                return function(*args)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.session.breaker("keras", error)
            return None

    def _update_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is not None and step.loss is None and args and _place() == step.place:
            step.loss = ops.stop_gradient(args[0])
        return original(*args, **kwargs)

    def _apply(self, original: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> Any:
        """The optimizer of TensorFlow and torch."""
        step, optimizer = self._step, self.model.optimizer
        if step is None or _place() != step.place:
            return original(grads, trainable_variables)
        grads = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        before = self._guarded(self._before, step, variables, grads, getattr(optimizer, "dynamic_scale", None))
        result = original(grads, variables)
        if before is not None:
            slots = list(zip(optimizer.variables, optimizer.variables, strict=True))
            self._guarded(self._after, step, variables, before, variables, slots)
        return result

    def _stateless_apply(self, original: Callable[..., Any], slots: Any, grads: Any, values: Any) -> Any:
        """The optimizer of JAX."""
        step, optimizer = self._step, self.model.optimizer
        if step is None or _place() != step.place:
            return original(slots, grads, values)
        variables = optimizer._trainable_variables
        scale = getattr(optimizer, "dynamic_scale", None)
        scale = None if scale is None else slots[_index(optimizer.variables, scale)]
        before = self._guarded(self._before, step, variables, grads, scale, values)
        new_values, new_slots = original(slots, grads, values)
        if before is not None:
            named = list(zip(optimizer.variables, new_slots, strict=True))
            self._guarded(self._after, step, variables, before, new_values, named)
        return new_values, new_slots

    def _before(self, step: _Step, variables: Any, grads: Any, scale: Any, values: Any = None) -> list[Any]:
        scale = self.model.optimizer.loss_scale_factor if scale is None else scale
        kept = [_copied(value) for value in (variables if values is None else values)]
        for variable, grad, value in zip(variables, grads, kept, strict=True):
            self._add(step, "param", variable, value)
            if grad is not None:
                grad = _dense(grad)
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
        site = self._names.site_of(kind, variable, ending)
        if f"{kind}/{site.name}" not in step.seen:
            step.seen.add(f"{kind}/{site.name}")
            step.parts.append((site, sketch(value)))

    def _call(self, site: str, type_name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if step is None:
            return original(*args, **kwargs)
        is_outermost = step.depth == 0
        if is_outermost:
            step.acts_place = _place()
        step.depth += 1
        try:
            outputs = original(*args, **kwargs)
        finally:
            step.depth -= 1
        self._guarded(self._called, step, site, type_name, outputs, is_outermost)
        return outputs

    def _called(self, step: _Step, site: str, type_name: str, outputs: Any, is_outermost: bool) -> None:
        """Of a layer that is called several times in a step, the first; inside a loop of the compiler, none."""
        if _place() == step.acts_place and site not in step.seen:
            step.seen.add(site)
            tensors = [x for x in keras.tree.flatten(outputs) if ops.is_tensor(x) and "float" in str(x.dtype)]
            for i, x in enumerate(tensors):
                name = site if len(tensors) == 1 else f"{site}.{i}"
                where = Site(kind="act", name=name, dtype=_dtype(x), owner=site, module_type=type_name)
                step.acts.append((where, sketch(ops.stop_gradient(x))))
        if is_outermost and _BACKEND == "jax" and step.acts:
            import jax

            # These are inside the function whose gradient is taken, and cannot be returned from it.
            arrived = functools.partial(self._acts_arrived, self._note(step.acts))
            jax.debug.callback(arrived, step.number, *stack([s for _, s in step.acts]))
            step.acts = []


# --------------------------------------------------------------------------------------------------------------- names


class _Names:
    """Names of a model's layers and variables: those the user gave; those that Keras made up are counted anew in each
    layer, so that the same model has the same names in every run."""

    def __init__(self) -> None:
        self.layers: list[tuple[Any, str]] = []
        self.variables: dict[int, tuple[str, str, str]] = {}
        self._taken: set[str] = set()

    def site_of(self, kind: str, variable: Any, ending: str = "") -> Site:
        name, owner, layer = self.variables.get(id(variable)) or self.add(variable, variable.path.replace("/", "."))
        shape = tuple(int(size) for size in variable.shape)
        return Site(
            kind=kind, name=name + ending, shape=shape, dtype=_dtype(variable), owner=owner, module_type=layer
        )

    def add(self, variable: Any, name: str, owner: str = "", layer: str = "") -> tuple[str, str, str]:
        name, unique = site_name(name), ""
        while name + unique in self._taken:
            unique = f"_{int(unique[1:] or 0) + 1}"
        self._taken.add(name + unique)
        self.variables[id(variable)] = (name + unique, owner, layer)
        return self.variables[id(variable)]


def _named(model: Any) -> _Names:
    names, seen = _Names(), {id(model)}

    def walk(layer: Any, prefix: str) -> None:
        for variable in layer._trainable_variables:
            if id(variable) not in names.variables:
                names.add(variable, prefix + variable.name.replace("/", "."), prefix[:-1], type(layer).__name__)
        for child, name in _children(layer):
            if id(child) in seen or isinstance(child, keras.layers.InputLayer):
                continue
            seen.add(id(child))
            names.layers.append((child, prefix + name))
            walk(child, f"{prefix}{name}.")

    names.layers.append((model, "model"))
    walk(model, "")
    return names


def _children(layer: Any) -> Iterator[tuple[Any, str]]:
    counts: dict[str, int] = {}
    for child in layer._layers:
        made_up = _snake(type(child).__name__)
        is_made_up = re.fullmatch(rf"{re.escape(made_up)}(_\d+)?", child.name)
        base = site_name((made_up if is_made_up else child.name).replace("/", "."))
        num = counts[base] = counts.get(base, -1) + 1
        yield child, base if num == 0 else f"{base}_{num}"


def _snake(name: str) -> str:
    """As Keras makes a layer's name from its class."""
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


# ----------------------------------------------------------------------------------------------------------- back-ends


def _place() -> Any:
    """Where values made now may be used: the trace of JAX, the graph of TensorFlow."""
    if _BACKEND == "jax":
        from jax.extend.core import get_opaque_trace_state

        return get_opaque_trace_state(convention="nnx")
    if _BACKEND == "tensorflow":
        import tensorflow as tf

        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return None


def _no_grad() -> Any:
    if _BACKEND == "torch":
        import torch

        return torch.no_grad()
    import contextlib

    return contextlib.nullcontext()


def _copied(value: Any) -> Any:
    """A value that stays what it is when the optimizer steps."""
    tensor = ops.convert_to_tensor(value)
    return tensor.detach().clone() if _BACKEND == "torch" else tensor


def _dense(grad: Any) -> Any:
    """TensorFlow's gradients of embeddings are rows and their places."""
    if _BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(grad)
    return grad


def _kept(value: Any) -> Any:
    """A number of its own: the next step may be given the memory of this one."""
    if _BACKEND == "jax" and ops.is_tensor(value):
        import jax.numpy as jnp

        return jnp.array(value, copy=True)
    return value.detach().clone() if _BACKEND == "torch" and ops.is_tensor(value) else value


def _num_replicas(model: Any) -> int:
    return int(model.distribute_strategy.num_replicas_in_sync) if _BACKEND == "tensorflow" else 1


def _dtype(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))


def _index(variables: Sequence[Any], wanted: Any) -> int:
    return next(i for i, variable in enumerate(variables) if variable is wanted)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif isinstance(value, int | float) or (ops.is_tensor(value) and len(value.shape) == 0):
            yield name, value


def _config(model: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}

    config: dict[str, Any] = {"keras": keras.__version__, "backend": _BACKEND, "model": model.name, **plain(params)}
    if model.optimizer is not None:
        config["optimizer"] = plain(model.optimizer.get_config())
    return config
