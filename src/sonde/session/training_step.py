"""The work of a training step, from its first forward pass to the start of the next one, in this order:

    model_begins ─► model_entered ─► forward_seen, module_returned … ─► model_returned     the forward pass
    optimizer_step                                                                          one step of an optimizer
    optimizers_stepped ─► step_ended ─► step_begins                                         the end of the step

Taps call the first two rows, through `WatchedModel`; `Steps` detects when the third is due. Each part runs separately:
one that fails costs only its own numbers, and the step counts all the same.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sonde.errors import UsageError
from sonde.probe.guarded import attempt
from sonde.schema.addends import MAX_ADDEND_BYTES
from sonde.session.process.threads import TrainingThreads
from sonde.session.recording import Recording
from sonde.session.snapshots.taker import SnapshotTaker
from sonde.session.training.thread import TrainingThread

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from sonde.probe.model import ModuleRef
    from sonde.probe.optimizer.hooks import Call, OptimizerHooks
    from sonde.probe.optimizer.tap import OptimizerStep, OptimizerTap
    from sonde.session.data.inspection import DataInspection
    from sonde.session.model.optimizer_names import OptimizerNames
    from sonde.session.model.structure import ModelDocument
    from sonde.session.model.watched import WatchedModel
    from sonde.session.plan import Plan
    from sonde.session.rest import Rest

_FACTS_EVERY: Final = 100


class StepRecorder:
    """Records the steps of one session. A `ModelHost` for its models and a `ThreadHost` for its training threads."""

    data: DataInspection
    document: ModelDocument
    optimizer_names: OptimizerNames
    rest: Rest

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._attempt = partial(attempt, recording.breaker)
        self.threads: TrainingThreads = TrainingThreads(recording, self, self._moved)
        self.snapshots: SnapshotTaker = SnapshotTaker(recording, self.threads)
        recording.at_beat.append(self.snapshots.asks.poll)
        self.hooks: OptimizerHooks | None = None
        """None until a model is watched, as is all that needs torch: a session may log numbers without it."""
        self._watching = threading.RLock()

    # ----------------------------------------------------------------------------------------------------- forward pass

    def is_resting(self, model: WatchedModel) -> bool:
        return self.rest.model_begins(model)

    def model_begins(self, model: WatchedModel) -> None:
        self.data.model_begins(model)

    def model_entered(self, model: WatchedModel) -> None:
        self.threads.runs(model)
        steps = model.training.steps
        model.unseen_updates.model_entered(model, steps)
        steps.model_entered(model)
        self.snapshots.forward_begins(model)
        if model.wants_inspection:
            model.inspection.forward_begins()

    def forward_seen(self, model: WatchedModel, place: ModuleRef, output: Any) -> None:
        # Parts of a pass that has started may run in other threads, which train nothing.
        if not model.forward.is_running:
            self.threads.runs(model)
        if model.is_root(place):
            model.training.steps.model_called(model, output)
        else:
            model.training.steps.part_called(model, place, output)
        self.snapshots.forward_begins(model)

    def module_returned(self, model: WatchedModel, place: ModuleRef, output: Any) -> None:
        self.snapshots.output(model, place, output)

    def model_returned(self, model: WatchedModel, args: Any, kwargs: Any, output: Any) -> None:
        model.unseen_updates.model_returned()
        if self.snapshots.draft is not None:
            self.snapshots.called(model, args, kwargs)
        self.data.model_returned(model, args, kwargs, output)

    def model_evaluated(self, model: WatchedModel, args: Any, kwargs: Any, output: Any) -> None:
        self.data.model_evaluated(model, args, kwargs, output)

    def number_returned(self, model: WatchedModel, module: nn.Module, args: Any, value: Tensor) -> None:
        self.data.number_returned(model, module, args, value)

    def pass_restarted(self, model: WatchedModel) -> None:
        self.snapshots.restart(model)
        self.data.restart(model)

    # --------------------------------------------------------------------------------------------------- optimizer step

    def optimizer_step(self, model: WatchedModel, step: OptimizerStep) -> Iterator[None]:
        """Before the step, gradients are what the optimizer will use and parameters what they were computed at; after
        it, the update is known. With a closure the gradients are made inside the step."""
        part, quiet, meter = self._attempt, self._quiet, model.meter
        are_grads_made = not (step.has_closure or step.is_made)

        self.snapshots.before_update(model, step)
        with part("step loss"):
            self.data.before_update(model, step)
        with quiet():
            with part("gradients and parameters"):
                model.read_before(step)
            with part("inspection"), meter.span("inspect" if model.wants_inspection else ""):
                model.inspection.before_update(model.training.steps.number)
            with part("optimizer scalars"), meter.span("scalars" if model.wants_scalars else ""):
                model.log_optimizer(step)
                if are_grads_made:
                    model.log_gradients(step)

        yield  # the optimizer steps

        with quiet(), meter.span(model.main_kind):
            if step.has_closure:
                with part("gradient scalars"), meter.span("scalars" if model.wants_scalars else ""):
                    model.log_gradients(step)
                with part("gradients"):
                    model.read_grads(step)
            if step.is_made:
                self._warn_of_missing(self.recording, step.optimizer)
            else:
                with part("updates"):
                    model.read_updates(step)
            with part("optimizer states"):
                model.read_states(step)
            with part("fingerprint"):
                model.note_weights(step)
        self.snapshots.after_update(model, step)
        with part("step loss"):
            self.data.after_update(model, step)

    # -------------------------------------------------------------------------------------------------- end of the step

    def optimizers_stepped(self, training: TrainingThread, step: int) -> None:
        self._emit(training, step)
        self._end_snapshot(training)
        if step != training.described_at:  # again at the end: in the first step more of them may follow
            training.described_at = step
            self._describe(training)
        with self._attempt("rest"):
            self.rest.begin(training, step)

    def step_ended(self, training: TrainingThread, step: int, wall_s: float) -> None:
        meter = training.governing.meter
        if self._has_data_of(training):
            meter.add(self.data.kind, self.data.take_own_s())
        with meter.span(""):
            self._emit(training, step)
            self.threads.position.step_made()
            self.threads.step_ended(training)
        with self._attempt("budget"), meter.span(""):
            training.governing.end_step(step, wall_s)
        with meter.span(""):
            self._describe(training)
            if step % _FACTS_EVERY == 0:
                with self._attempt("facts"):
                    self.note_facts()

    def step_counted(self, training: TrainingThread, step: int) -> None:
        self._emit(training, step)  # an evaluation may have followed it
        self.threads.step_ended(training)

    def step_begins(self, training: TrainingThread, step: int) -> None:
        for model in self.threads.models_of(training):
            with self._attempt("schedule"), model.meter.span(""):
                model.begin_step(step)
        if self.snapshots.are_of(training):
            with self._attempt("snapshot schedule"):
                self.snapshots.begin_step(step)

    def optimizers(self, training: TrainingThread) -> set[int]:
        return {id(one) for model in self.threads.models_of(training) for one in model.optimizers.watched}

    def _emit(self, training: TrainingThread, step: int) -> None:
        """Pass the measurements to the writer, as part of this step."""
        for model in self.threads.models_of(training):
            with self._attempt("writing records"):
                self._emit_model(model, step)
        if self._has_data_of(training):
            with self._attempt("data inspection"), training.governing.meter.span(self.data.kind):
                self.data.emit(step)

    def _emit_model(self, model: WatchedModel, step: int) -> None:
        part, quiet, meter, kind = self._attempt, self._quiet, model.meter, model.main_kind
        with part("writing records"), quiet(), meter.span(kind):
            tables = model.take()
            if tables:
                self._put_tables(self.recording.writer, tables, step)
            addends = model.addends.take(step)
            if addends is not None:
                self.recording.writer.put(addends, MAX_ADDEND_BYTES, step=step)
        with part("writing an inspection"), quiet(), meter.span("inspect" if model.wants_inspection else ""):
            values = model.inspection.take()
            if values:
                model.log(values, step)
        if model.nonfinite is not None:
            with part("non-finite values"), quiet(), meter.span("finite" if model.wants_finite else ""):
                model.nonfinite.emit(step)
        model.prediction.tell()

    def _end_snapshot(self, training: TrainingThread) -> None:
        if self.snapshots.are_of(training):
            with self._attempt("snapshot"):
                self.snapshots.step_over()

    def _describe(self, training: TrainingThread) -> None:
        """Write model.json, if its content has changed."""
        models = self.threads.models_of(training)
        if models:
            with self._attempt("model structure"):
                self.document.refresh(models, self.threads.models)

    def _has_data_of(self, training: TrainingThread) -> bool:
        return self.hooks is not None and self.data.thread is training

    # ---------------------------------------------------------------------------------------- steps that record nothing

    def next_recorded(self, training: TrainingThread, after: int) -> int:
        if len(self.threads.all) > 1 or self.is_keeping_tensors or self.recording.breaker.is_open:
            return after + 1
        until = min((model.next_recorded(after) for model in self.threads.models_of(training)), default=after + 1)
        return next((step for step in range(after + 1, until) if self.snapshots.is_due(step)), until)

    def modes(self, training: TrainingThread) -> dict[int, bool]:
        models = [(model, model.names.model()) for model in self.threads.models_of(training)]
        return {id(model): module.training for model, module in models if module is not None}

    def resting(self, *, is_on: bool) -> None:
        for model in self.models:
            model.rest(is_on=is_on)
        self.data.rest(is_on=is_on)

    def evaluated(self, training: TrainingThread, step: int) -> None:
        if self._has_data_of(training):
            with self._attempt("data inspection"):
                self.data.trained_again()
                self.data.emit(step)

    def _wake(self) -> None:
        if self.hooks is not None:
            with self._attempt("rest"):
                self.rest.disturb()

    # ------------------------------------------------------------------------------------------ steps ended by the user

    def end_by_user(self) -> None:
        """`sonde.step()`. With watched optimizers, their steps count; otherwise record the current state."""
        self._wake()
        training = self.training
        with self._attempt("step"):
            if not (training.steps.is_counted_by_hooks or training.steps.is_over):
                training.steps.finish()
                self._sweep(training)
        with self._attempt("step"):
            training.steps.close()

    def _sweep(self, training: TrainingThread) -> None:
        with training.steps.lock:
            models = self.threads.models_of(training)
            for model in models:
                # A thread that has not started yet may own a model that was not run: reading its gradients while that
                # thread clears them would crash torch.
                if model.has_run or len(models) == 1 or model.watched_in is training.thread:
                    model.is_trained = True
                    with self._attempt("step"):
                        self._sweep_model(model)
            self._end_snapshot(training)

    def _sweep_model(self, model: WatchedModel) -> None:
        step = model.current_step()
        if step is None:
            return
        self.snapshots.before_update(model, step)
        with self._quiet(), model.meter.span(model.main_kind):
            model.log(model.optimizer_scalars.clipped(step))
            model.read_grads(step)
            model.inspection.before_update(model.training.steps.number)
            model.read_params(step)

    def skip(self) -> None:
        """Count a step that the optimizer skipped because a gradient scaler found non-finite gradients."""
        self._wake()
        with self._attempt("skipped step"):
            self.training.steps.skip()

    # --------------------------------------------------------------------------------------------------- watched models

    @property
    def training(self) -> TrainingThread:
        """The training thread that counts the steps of the calling thread; for a thread that trains nothing, the
        training thread that is furthest ahead. Most programs have only one."""
        return self.threads.current

    @property
    def models(self) -> list[WatchedModel]:
        return self.threads.models

    @property
    def is_keeping_tensors(self) -> bool:
        return self.snapshots.draft is not None

    def is_fresh(self) -> bool:
        return self.threads.position.is_fresh

    def optimizer_taps(self) -> Iterable[OptimizerTap]:
        return (model.optimizers for model in self.threads.models)

    @property
    def overhead(self) -> float:
        """Fraction of all time that recording took, as far as it is known."""
        return float(self.threads.facts()["fraction"] or 0.0)

    def watch(self, module: nn.Module, optimizers: list[Optimizer] | None, plan: Plan, snapshots: Any) -> None:
        """Watch a model. Watching it again replaces the earlier options."""
        from sonde.session.model.replaced import watched_before
        from sonde.session.model.watched import WatchedModel

        self._wake()
        with self._watching:
            replaced = watched_before(module, plan.prefix, self.models)
            self._tell_taken_over(replaced)
            self.unwatch(replaced)
            self._hook_optimizers()
            model = WatchedModel(
                self.recording, self, module, optimizers, plan, training=self.training, watched_in=self.threads.here
            )
            self.threads.models = [*self.models, model]
            self._keep_snapshots(model, snapshots)
        writer = self.recording.writer
        if self.is_fresh():
            writer.set_step(self.training.steps.number, is_first=True)
        writer.note(
            watching={"schedules": plan.described(), "activation_rows": self.recording.settings.activation_rows}
        )

    def unwatch(self, models: Iterable[WatchedModel]) -> None:
        for model in list(models):
            model.detach()
            self.threads.models = [other for other in self.models if other is not model]
            self.snapshots.unfollow(model)

    def _hook_optimizers(self) -> None:
        """One pair of hooks for all models."""
        if self.hooks is not None:
            return
        from sonde.probe.guards import quiet
        from sonde.probe.optimizer.hooks import OptimizerHooks
        from sonde.probe.optimizer.scaler import ScalerTap
        from sonde.session.data.inspection import DataInspection
        from sonde.session.model.optimizer_names import OptimizerNames
        from sonde.session.model.structure import ModelDocument
        from sonde.session.model.tables import put_tables
        from sonde.session.model.unseen_steps import warn_of_missing
        from sonde.session.rest import Rest

        # Not imported where they are used, which is in every step.
        self._quiet, self._put_tables, self._warn_of_missing = quiet, put_tables, warn_of_missing
        failed = self.recording.breaker
        self.data = DataInspection(self.recording, self.threads)
        self.document = ModelDocument(self.recording.writer)
        self.optimizer_names = OptimizerNames()
        hooks = OptimizerHooks(
            failed,
            on_begin=self._optimizer_begins,
            on_end=self._optimizer_ended,
            on_unseen=self._optimizer_unseen,
            timed=lambda: self.training.governing.meter.span(""),
        )
        self.rest = hooks.counter = Rest(self)
        self.snapshots.asks.on_put = self.rest.disturb
        self.recording.at_beat.append(self._report_rest)
        self.recording.at_finish += [ScalerTap(hooks.skip, failed).detach, self.data.detach]
        self.hooks = hooks  # last: other threads take it as a sign that the rest is there

    def _report_rest(self) -> None:
        """Called on the writer thread: steps that are only counted are not reported one by one."""
        if self.rest.is_on:
            self.recording.writer.set_step(self.training.steps.last)

    def _optimizer_begins(self, call: Call) -> None:
        for training in self.threads.of_call(call):
            training.steps.optimizer_begins(call)

    def _optimizer_ended(self, call: Call) -> None:
        for steps in call.counted_by or [training.steps for training in self.threads.of_call(call)]:
            steps.optimizer_ended(call)

    def _optimizer_unseen(self, optimizer: Optimizer, where: str) -> None:
        from sonde.session.model.unseen_steps import warn_of_unseen

        warn_of_unseen(self.recording, self.training.steps, optimizer, where)

    def _tell_taken_over(self, replaced: Iterable[WatchedModel]) -> None:
        if any(self.threads.is_elsewhere(model) for model in replaced):
            self.recording.warn_once(
                "watched in two threads",
                "a model that another thread trains is no longer recorded: a model with the same parameter names was "
                'watched instead. Tell them apart with a prefix: watch(model, optimizer, prefix="generator.").',
            )

    def _keep_snapshots(self, model: WatchedModel, snapshots: Any) -> None:
        try:
            self.snapshots.follow(model, snapshots)
        except BaseException:
            self.unwatch([model])
            raise
        if self.snapshots.training is model.training:
            self.snapshots.begin_step(model.training.steps.number)

    def _moved(self) -> None:
        self.snapshots.check_threads()

    # --------------------------------------------------------------------------------------------------- rewind and end

    def rewind(self, step: Any) -> bool:
        """Start a new attempt at this step. An invalid step is ignored, with a warning."""
        try:
            at = operator.index(step)
        except TypeError:
            at = -1
        recording, threads = self.recording, self.threads
        next_step = recording.next_step
        if threads.are_several:
            recording.warn_once(
                "rewind of several threads",
                f"rewind({step!r}) was ignored: several threads have trained in this run, and each counts its own "
                "steps.",
            )
            return False
        if not threads.position.may_return_to(at, next_step):
            recording.warn_once(
                "rewind", f"rewind({step!r}) was ignored: the step must be between 0 and the next one, {next_step}."
            )
            return False
        self.finish()  # the step in progress is abandoned; its measurements stay in the attempt that ends
        self.snapshots.rewound()
        recording.writer.begin_attempt(at, after=next_step)
        threads.position.returned(next_step)
        threads.restart(at)
        if self.models:
            recording.writer.set_step(at, is_first=True)
        return True

    def flush(self) -> None:
        """Stop waiting for what is not known yet."""
        self._wake()
        for training in self.threads.all:
            training.steps.flush()

    def warn_of_uncounted(self) -> None:
        """The session ends normally: warn about steps that nothing counted."""
        for model in self.models:
            with self._attempt("finish"):
                model.unseen_updates.finish(model.training.steps)

    def finish(self) -> None:
        """Finish: no step follows."""
        if self.hooks is not None:
            with self._attempt("rest"):
                self.rest.wake()
        for training in self.threads.all:
            with training.steps.lock:
                with self._attempt("finish"):
                    training.steps.finish()
                if training.steps.is_over:
                    with self._attempt("finish"):
                        self._mark_last(training)
                        training.steps.close()
                self._emit(training, training.steps.number)

    def _mark_last(self, training: TrainingThread) -> None:
        """A run ends at its last record: if the last step has none, record its learning rate."""
        for model in self.threads.models_of(training):
            if not model.wants_scalars:
                model.log(model.optimizer_scalars.rates_now(), training.steps.number)

    def detach(self) -> None:
        """Remove every hook."""
        for model in self.models:
            model.detach()
        self.threads.models = []

    def note_facts(self) -> None:
        """Facts about the recording, for viewers."""
        facts: dict[str, Any] = {"overhead": self.threads.facts()}
        if self.models:
            from sonde.session.model.coverage import coverage_of

            facts["coverage"] = coverage_of(self.models)
        if self.recording.breaker.num_errors:
            facts["errors"] = self.recording.breaker.num_errors
        self.recording.writer.note(**facts)

    def snapshot(self, kinds: Any) -> int | None:
        """The number of the step whose tensors will be kept; None, with a warning, if there will be no snapshot."""
        self._wake()
        try:
            return self.snapshots.ask(kinds)
        except UsageError as error:
            self.recording.warn_once(f"snapshot {error}", f"no snapshot was taken: {error}")
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker("snapshot", error)
        return None
