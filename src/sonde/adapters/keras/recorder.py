"""Records a Keras `fit`: replaces its training function by one that shows what happens inside it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from sonde.adapters.keras.backend import (
    BACKEND,
    is_compiled,
    kept,
    num_replicas,
    optimizers,
    wait_for_callbacks,
)
from sonde.adapters.keras.inside import OURS, InsideStep
from sonde.adapters.keras.rehearsal import Made, stage_for
from sonde.adapters.keras.snapshots import KerasSnapshots
from sonde.adapters.keras.structure import describe, settings_of
from sonde.budget.compiled_meter import CompiledMeter
from sonde.probe.optimizer.hyperparameters import Hyperparameters
from sonde.probe.schedule import Schedule
from sonde.schema.layout import MODEL_FILE
from sonde.session.session import Session

UNKNOWN: Final = "there were too few steps without recording to compare with"
_END_OF_DATA: Final = ("StopIteration", "OutOfRangeError")


class KerasRecorder:
    """Wraps a model's training function, its optimizer and its layers while one `fit` runs."""

    def __init__(
        self,
        session: Session,
        model: Any,
        *,
        when: Schedule,
        activations: bool,
        optim: bool,
        snapshots: Any,
        budget: Any,
        num_batches: int | None,
        iterations: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.session, self.model, self.batch = session, model, 0
        self._when, self._num_batches, self._on_error = when, num_batches, on_error
        self.set_iterations(iterations)
        self._inside = InsideStep(session, model, optim=optim, acts_arrived=self._acts_arrived)
        self._optimizers = [(optimizer, settings_of(optimizer)) for optimizer in optimizers(model)]
        self._stage = stage_for(model)
        self._snapshots = KerasSnapshots(session, model, self._inside, snapshots)
        self._plain: Callable[..., Any] = model.train_function
        self._functions: dict[frozenset[str], Callable[..., Any]] = {}
        """A training function for each set of kinds of whole tensors that it returns; they are compiled when used."""
        self._hyperparameters = Hyperparameters()
        self._is_seen = False
        self._num_calls = 0
        self._result: Any = None
        self._undo: list[Callable[[], Any]] = []
        self._meter = self._measure(model, budget)
        if num_replicas(model) > 1:
            session.recording.warn_once(
                "keras replicas", "under tf.distribute only the values in the logs are recorded."
            )
        try:
            self._attach(model, activations)
        except BaseException:
            self.restore()
            raise

    def set_iterations(self, iterations: int) -> None:
        """The number of steps of the optimizer before the next step of the run."""
        self._offset = self.session.step_number - iterations

    @property
    def is_fresh(self) -> bool:
        """Whether the training function was not called yet."""
        return not self._num_calls

    def _attach(self, model: Any, activations: bool) -> None:
        plain, inside = self._plain, self._inside
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
            self.wrap(layer, "call", functools.partial(inside.call, site, layer))
        model.make_train_function(force=True)
        self._functions[frozenset()] = model.train_function
        model.train_function = functools.partial(self._train_function, plain)

    def _recording(self, kinds: frozenset[str]) -> Callable[..., Any]:
        """The training function that returns these whole tensors too."""
        if kinds not in self._functions:
            model, ours, step = self.model, self.model.train_function, vars(self.model)["train_step"]
            # Another object: JAX knows compiled functions by their identity.
            vars(model)["train_step"] = functools.wraps(step)(functools.partial(step))
            try:
                model.make_train_function(force=True)
                self._functions[kinds] = model.train_function
            finally:
                vars(model)["train_step"], model.train_function = step, ours
        return self._functions[kinds]

    def _measure(self, model: Any, budget: Any) -> CompiledMeter | None:
        """The cost of recording is estimated by comparison in a compiled step, and measured in a torch step."""
        governing = self.session.steps.training.governing
        if budget is not ...:
            self.session.recording.ledger.fraction = self.session.settings.changed(budget=budget).budget
        governing.is_together = True
        if not is_compiled(model):
            return None
        if not governing.governor.lost_s:
            governing.unknown = UNKNOWN
        if not isinstance(governing.meter, CompiledMeter):
            governing.meter = CompiledMeter()
        return governing.meter

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Set on the instance, bypassing Keras's attribute tracking."""
        own, original = vars(owner).get(name), getattr(owner, name)
        vars(owner)[name] = functools.wraps(original)(functools.partial(wrapper, original))
        self._undo.append(lambda: vars(owner).pop(name, None) if own is None else vars(owner).update({name: own}))

    def restore(self) -> None:
        """Restore everything; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    # --------------------------------------------------------------------------------------------- outside the compiler

    def _train_function(self, plain: Callable[..., Any], *args: Any) -> Any:
        session = self.session
        self._num_calls += 1
        if session.is_finished or session.recording.breaker.is_open:
            return plain(*args)
        num_steps, step = self._steps(), session.step_number
        whole = self._begin_snapshot(step, num_steps, args)
        if self._meter is not None:
            self._meter.begin(time.perf_counter())
        is_wanted = any(map(self._when, range(step, step + num_steps))) and num_replicas(self.model) == 1
        is_recording = session.steps.training.governing.allows(step, "optim", scheduled=is_wanted)
        self._inside.is_recording = is_recording or bool(whole)
        self._inside.keeping, self._stage.kinds = self._snapshots.keeping(whole), whole
        self._inside.collector.begin_step(step)
        try:
            is_recording = self._inside.is_recording
            made = self._stage.make(plain, self._recording(whole), *args) if is_recording else Made(plain(*args))
        except BaseException as error:
            if type(error).__name__ not in _END_OF_DATA:
                self._on_error(error)
            raise
        finally:
            self._inside.is_recording, was_recording = False, self._inside.is_recording
            self._inside.keeping = None
        found = made.logs.pop(OURS, None) if isinstance(made.logs, dict) else None
        inside: dict[str, Any] = {}
        with self._guarded():
            if made.error is not None:
                raise made.error
            inside = self._recorded(found) if was_recording else {}
            self._put(inside)
        with self._guarded():
            if whole and BACKEND == "jax":
                wait_for_callbacks()
            self._snapshots.end()
        for _ in range(num_steps - 1):
            session.step()
        with self._guarded():
            self._put(self._logged(made.result[0] if BACKEND == "jax" else made.result, inside, was_recording))
        if self._meter is not None and not whole:
            # A separate number of the step, whose memory is not reused: the state goes to the next step.
            self._meter.note(is_recorded=was_recording, result=self._result)
        session.step()
        return made.result

    def _begin_snapshot(self, step: int, num_steps: int, args: Any) -> frozenset[str]:
        """Copy the variables for a snapshot of this step; returns the kinds that the step has to return itself."""
        kinds: frozenset[str] = frozenset()
        with self._guarded(), self.session.steps.training.governing.meter.span("snapshots"):
            kinds = self._snapshots.begin(step, num_steps, args)
        return kinds if num_replicas(self.model) == 1 else frozenset()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.session.recording.breaker("keras", error)

    def _steps(self) -> int:
        """The number of steps in one call of the training function."""
        num = int(self.model.steps_per_execution)
        if num > 1:
            self.session.recording.warn_once(
                "keras execution", f"steps_per_execution={num}: the first of every {num} steps is recorded."
            )
        total = self._num_batches
        return max(min(num, total - self.batch), 1) if total else num

    def _recorded(self, found: Mapping[str, Any] | None) -> dict[str, Any]:
        """Record the sketches; returns the numbers among the results."""
        why_not = self._stage.why_not
        if why_not:
            self.session.recording.warn_once("keras insides", f"only this model's logs are recorded: {why_not}.")
        elif found is None and not self._is_seen:
            message = "this model's training step exposes no gradients; only its logs are recorded."
            self.session.recording.warn_once("keras unseen", message)
        numbers = self._inside.collector.put(self._snapshots.add(found or {}), step=self.session.step_number)
        if found is not None and not self._is_seen:
            self._is_seen = True
            self._describe()
        for at, values in self._hyperparameters.at(self._inside.settings.items(), self.session.step_number):
            self.session.log(values, step=at)
        return numbers

    def _logged(self, logs: Any, inside: Mapping[str, Any], was_recording: bool) -> dict[str, Any]:
        """The logs of the last of these steps. Their loss is a mean since the start of the epoch, not that of the
        batch."""
        numbers = dict(logs) if isinstance(logs, Mapping) else {}
        if "loss" in inside or (self._is_seen and not was_recording):
            numbers.pop("loss", None)
        return numbers

    def _put(self, numbers: Mapping[str, Any]) -> None:
        flat = {name: kept(value) for name, value in _flat(numbers)}
        self._result = next((value for value in flat.values() if hasattr(value, "is_ready")), self._result)
        self.session.log(flat)

    def _describe(self) -> None:
        """model.json: after the first observed step, when everything is built and the order of calls is known."""
        inside = self._inside
        document = describe(inside.names, self.model, self._optimizers, inside.calls)
        self.session.recording.writer.document(MODEL_FILE, document)

    def _acts_arrived(self, keys: Sequence[str], number: Any, *values: Any) -> None:
        """Called on a JAX thread."""
        try:
            found = dict(zip(keys, values, strict=True))
            self._inside.collector.put(self._snapshots.add(found), step=int(number) + self._offset)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.session.recording.breaker("keras activations", error)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield name, value
