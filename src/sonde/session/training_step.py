"""What is done in a training step, from its first forward pass to the beginning of the next one, in this order:

    model_begins ─► model_entered ─► forward_seen, module_returned … ─► model_returned     the forward pass
    optimizer_step                                                                          one step of an optimizer
    optimizers_stepped ─► step_ended ─► step_begins                                         the end of the step

Taps call the first two rows, through `WatchedModel`; `Steps` finds out when the third is due. Each part is attempted by
itself: one that fails costs its own numbers only, and the step counts all the same.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sonde.errors import UsageError
from sonde.probe.guarded import attempt
from sonde.session.recording import Recording
from sonde.session.snapshots.taker import SnapshotTaker
from sonde.session.threads import TrainingThreads
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

_FACTS_EVERY: Final = 100


class StepRecorder:
    """Of one session. A `ModelHost` for its models and a `ThreadHost` for the threads that train them."""

    data: DataInspection
    document: ModelDocument
    optimizer_names: OptimizerNames

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._attempt = partial(attempt, recording.breaker)
        self.threads: TrainingThreads = TrainingThreads(recording, self, self._moved)
        self.snapshots: SnapshotTaker = SnapshotTaker(recording, self.threads)
        recording.at_beat.append(self.snapshots.asks.poll)
        self.hooks: OptimizerHooks | None = None
        """None until a model is watched, as is all that needs torch: a session may log numbers without it."""
        self._watching = threading.RLock()

    # --------------------------------------------------------------------------------------------- the forward pass

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
        # Parts of a pass that was seen to begin may run in other threads, which train nothing.
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

    # ------------------------------------------------------------------------------------- one step of an optimizer

    def optimizer_step(self, model: WatchedModel, step: OptimizerStep) -> Iterator[None]:
        """Before the step, gradients are what the optimizer will use and parameters what they were computed at; after
        it, the update is known. With a closure the gradients are made inside the step."""
        part, quiet, meter, kind = self._attempt, self._quiet, model.meter, model.main_kind
        are_grads_made = not (step.has_closure or step.is_made)

        self.snapshots.before_update(model, step)
        with part("loss of the step"):
            self.data.before_update(model, step)
        with quiet():
            with part("gradients and parameters"):
                model.read_before(step)
            with part("inspection"), meter.span(kind):
                model.inspection.before_update(model.training.steps.number)
            with part("scalars of the optimizer"), meter.span(kind):
                model.log_optimizer(step)
            if are_grads_made:
                with part("scalars of the gradients"), meter.span(kind):
                    model.log_gradients(step)

        yield  # the optimizer steps

        with quiet(), meter.span(model.main_kind):
            if step.has_closure:
                with part("scalars of the gradients"):
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
        with part("loss of the step"):
            self.data.after_update(model, step)

    # ------------------------------------------------------------------------------------------ the end of the step

    def optimizers_stepped(self, training: TrainingThread, step: int) -> None:
        self._emit(training, step)
        self._end_snapshot(training)
        if step != training.described_at:  # again at the end: in the first step more of them may follow
            training.described_at = step
            self._describe(training)

    def step_ended(self, training: TrainingThread, step: int, wall_s: float) -> None:
        self._emit(training, step)
        self.threads.position.step_made()
        self.threads.step_ended(training)
        with self._attempt("budget"):
            if self._has_data_of(training):
                # Batches are told apart in every step, which nothing thins out.
                training.governing.meter.add("inspect" if self.data.is_inspecting else "", self.data.take_own_s())
            training.governing.end_step(step, wall_s)
        self._describe(training)
        if step % _FACTS_EVERY == 0:
            with self._attempt("facts"):
                self.note_facts()

    def step_begins(self, training: TrainingThread, step: int) -> None:
        for model in self.threads.models_of(training):
            with self._attempt("schedule"):
                model.begin_step(step)
        if self.snapshots.are_of(training):
            with self._attempt("schedule of snapshots"):
                self.snapshots.begin_step(step)

    def optimizers(self, training: TrainingThread) -> set[int]:
        return {id(one) for model in self.threads.models_of(training) for one in model.optimizers.watched}

    def _emit(self, training: TrainingThread, step: int) -> None:
        """Hand what was measured to the writer, as a part of this step."""
        for model in self.threads.models_of(training):
            with self._attempt("handing over"):
                self._emit_model(model, step)
        if self._has_data_of(training):
            with self._attempt("data inspection"):
                self.data.emit(step)

    def _emit_model(self, model: WatchedModel, step: int) -> None:
        part, quiet, meter, kind = self._attempt, self._quiet, model.meter, model.main_kind
        with part("handing over"), quiet(), meter.span(kind):
            tables = model.take()
            if tables:
                self._put_tables(self.recording.writer, tables, step)
        with part("handing over an inspection"), quiet(), meter.span(kind):
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
        """model.json, if what it says has changed."""
        models = self.threads.models_of(training)
        if models:
            with self._attempt("structure of the model"):
                self.document.refresh(models, self.threads.models)

    def _has_data_of(self, training: TrainingThread) -> bool:
        return self.hooks is not None and self.data.thread is training

    # ---------------------------------------------------------------------------------- steps that the user ends

    def end_by_user(self) -> None:
        """`sonde.step()`. Where optimizers are watched their steps count; otherwise take what is there now."""
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
                # A thread that has not begun yet may own a model that was not run: reading its gradients while that
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
        """The step counts, though the optimizer was kept from it: a scaler found gradients that are not finite."""
        with self._attempt("skipped step"):
            self.training.steps.skip()

    # ----------------------------------------------------------------------------------------- what is being trained

    @property
    def training(self) -> TrainingThread:
        """Where the steps of the calling thread are counted; for a thread that trains nothing, those of the training
        thread that is furthest ahead. Most programs have only one."""
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
        """Share of all time that recording took, as far as is known."""
        if len(self.threads.all) == 1:
            return self.training.governing.governor.overhead
        return float(self.threads.facts()["fraction"] or 0.0)

    def watch(self, module: nn.Module, optimizers: list[Optimizer] | None, plan: Plan, snapshots: Any) -> None:
        """Begin with a model. Watching it again replaces what was asked for before."""
        from sonde.session.model.replaced import watched_before
        from sonde.session.model.watched import WatchedModel

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

        # Not imported where they are used, which is in every step.
        self._quiet, self._put_tables, self._warn_of_missing = quiet, put_tables, warn_of_missing
        failed = self.recording.breaker
        self.data = DataInspection(self.recording, self.threads)
        self.document = ModelDocument(self.recording.writer)
        self.optimizer_names = OptimizerNames()
        self.hooks = OptimizerHooks(
            failed,
            on_begin=self._optimizer_begins,
            on_end=self._optimizer_ended,
            on_unseen=self._optimizer_unseen,
        )
        self.recording.at_finish += [ScalerTap(self.hooks.skip, failed).detach, self.data.detach]

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
                "a model that another thread trains is no longer recorded: one with the same parameter names was "
                'watched in its place. Tell them apart by a name: watch(model, optimizer, prefix="generator.").',
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

    # ------------------------------------------------------------------------------------------ where it goes, and ends

    def rewind(self, step: Any) -> bool:
        """Begin a new attempt at this step. A step that cannot be is ignored, with a warning."""
        try:
            at = operator.index(step)
        except TypeError:
            at = -1
        recording, threads = self.recording, self.threads
        next_step = recording.next_step
        if threads.are_several:
            recording.warn_once(
                "rewind of several threads",
                f"rewind({step!r}) is ignored: several threads have trained in this run, and each counts its own "
                "steps.",
            )
            return False
        if not threads.position.may_return_to(at, next_step):
            recording.warn_once(
                "rewind", f"rewind({step!r}) is ignored: it takes a step from 0 to the next one, which is {next_step}."
            )
            return False
        self.finish()  # a step in progress is given up; what was measured of it stays in the attempt that ends
        self.snapshots.rewound()
        recording.writer.begin_attempt(at, after=next_step)
        threads.position.returned(next_step)
        threads.restart(at)
        if self.models:
            recording.writer.set_step(at, is_first=True)
        return True

    def flush(self) -> None:
        """Do not wait any longer for what is not known yet."""
        for training in self.threads.all:
            training.steps.flush()

    def warn_of_uncounted(self) -> None:
        """The session ends as it should: tell of steps that nothing counted."""
        for model in self.models:
            with self._attempt("finish"):
                model.unseen_updates.finish(model.training.steps)

    def finish(self) -> None:
        """No step follows."""
        for training in self.threads.all:
            with training.steps.lock:
                with self._attempt("finish"):
                    training.steps.finish()
                if training.steps.is_over:
                    with self._attempt("finish"):
                        training.steps.close()
                self._emit(training, training.steps.number)

    def detach(self) -> None:
        """Remove every hook."""
        for model in self.models:
            model.detach()
        self.threads.models = []

    def note_facts(self) -> None:
        """What a viewer should know of how this was recorded."""
        facts: dict[str, Any] = {"overhead": self.threads.facts()}
        if self.models:
            from sonde.session.model.coverage import coverage_of

            facts["coverage"] = coverage_of(self.models)
        if self.recording.breaker.num_errors:
            facts["errors"] = self.recording.breaker.num_errors
        self.recording.writer.note(**facts)

    def snapshot(self, kinds: Any) -> int | None:
        """The number of the step whose tensors will be kept; None, with a warning, where there will be none."""
        try:
            return self.snapshots.ask(kinds)
        except UsageError as error:
            self.recording.warn_once(f"snapshot {error}", f"no snapshot: {error}")
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker("snapshot", error)
        return None
