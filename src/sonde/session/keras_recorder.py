"""A `fit` of Keras while it is recorded: its training function is one that shows what happens inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from keras import ops

from sonde.probe.keras_backend import BACKEND, kept, num_replicas, optimizers
from sonde.probe.schedule import Schedule
from sonde.reduce.keras import to_rows
from sonde.session.handed import put_rows, put_scalars
from sonde.session.keras_inside import OURS, InsideStep
from sonde.session.session import Session

_END_OF_DATA: Final = ("StopIteration", "OutOfRangeError")


class KerasRecorder:
    """Stands in a model's training function, its optimizer and its layers for as long as one `fit` lasts."""

    def __init__(
        self,
        session: Session,
        model: Any,
        *,
        when: Schedule,
        activations: bool,
        optim: bool,
        num_batches: int | None,
        iterations: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.session, self.model, self.batch = session, model, 0
        self._when, self._num_batches, self._on_error = when, num_batches, on_error
        self._offset = session.step_number - iterations
        self._inside = InsideStep(session, model, optim=optim, acts_arrived=self._acts_arrived)
        self._is_seen = False
        self._undo: list[Callable[[], Any]] = []
        if num_replicas(model) > 1:
            session.warn_once("keras replicas", "under tf.distribute only the numbers in the logs are recorded.")
        try:
            self._attach(model, activations)
        except BaseException:
            self.restore()
            raise

    def _attach(self, model: Any, activations: bool) -> None:
        plain, inside = model.train_function, self._inside
        self._undo.append(lambda: setattr(model, "train_function", plain))
        self.wrap(model, "train_step", inside.train_step)
        for optimizer in optimizers(model):
            if BACKEND == "jax":
                self.wrap(optimizer, "stateless_apply", functools.partial(inside.stateless_apply, optimizer))
            else:
                self.wrap(optimizer, "apply", functools.partial(inside.apply, optimizer))
        if getattr(model, "_loss_tracker", None) is not None:
            self.wrap(model._loss_tracker, "update_state", inside.update_state)
        for layer, site in inside.names.layers if activations else ():
            self.wrap(layer, "call", functools.partial(inside.call, site, type(layer).__name__))
        model.make_train_function(force=True)
        model.train_function = functools.partial(self._train_function, plain, model.train_function)

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
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
        self._inside.is_recording = self._when(session.step_number + skipped) and num_replicas(self.model) == 1
        try:
            result = (recording if self._inside.is_recording else plain)(*args)
        except BaseException as error:
            if type(error).__name__ not in _END_OF_DATA:
                self._on_error(error)
            raise
        finally:
            self._inside.is_recording, was_recording = False, self._inside.is_recording
        logs, *state = result if BACKEND == "jax" else (result,)
        found = logs.pop(OURS, None) if isinstance(logs, dict) else None
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
        total = self._num_batches
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
            if key.isdigit():
                put_rows(session, self._inside.sites[int(key)], functools.partial(to_rows, *value))
            else:
                numbers[key] = value  # the loss of this batch; the one in the logs is a mean since the epoch began
        if not was_recording and self._is_seen:
            numbers.pop("loss", None)  # not the batch's
        flat = {name: kept(value) for name, value in _flat(numbers)}
        if flat:
            put_scalars(session, flat)

    def _acts_arrived(self, key: int, number: Any, counts: Any, sums: Any) -> None:
        """On a thread of JAX's."""
        try:
            put_rows(
                self.session,
                self._inside.sites[key],
                functools.partial(to_rows, counts, sums),
                step=int(number) + self._offset,
            )
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.session.breaker("keras activations", error)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif isinstance(value, int | float) or (ops.is_tensor(value) and len(value.shape) == 0):
            yield name, value
