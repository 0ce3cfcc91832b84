"""One recording: counts steps, takes logged numbers, keeps the watched models, and ends truthfully.

Nothing here raises once training runs, except what the user did not ask us to survive: KeyboardInterrupt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sonde.config import Settings
from sonde.errors import SessionError, UsageError
from sonde.probe.guarded import attempt
from sonde.probe.schedule import ALWAYS, Schedule, as_schedule, every, first
from sonde.schema.layout import ENDED_AT_EXIT, RunStatus
from sonde.schema.records import Event, Severity
from sonde.session import forks
from sonde.session.breaker import Breaker
from sonde.session.ending import final_status, keep_exit_by_signal, last_error, print_line, shown, status_of
from sonde.session.exits import exits
from sonde.session.null import NullSession
from sonde.session.observers.mirror import Observers, mirror_observers
from sonde.session.observers.rules import LiveRules
from sonde.session.scalars import put_logged
from sonde.session.snapshots.taker import SnapshotTaker
from sonde.session.training.position import Position, rewind
from sonde.session.training.threads import TrainingThreads
from sonde.session.training.unseen_steps import warn_of_unseen
from sonde.write.ending import leave_exit_code
from sonde.write.folder import absolute, remove_run
from sonde.write.writer import Writer, WriterOptions

if TYPE_CHECKING:
    from sonde.diagnose.finding import Finding
    from sonde.probe.optimizer.hooks import Call, OptimizerHooks
    from sonde.session.budget import BudgetController
    from sonde.session.entry.automatic import Automatic
    from sonde.session.inspect.data import DataInspection
    from sonde.session.training.thread import TrainingThread
    from sonde.session.training.writer import StepWriter
    from sonde.session.watched_model import WatchedModel

DEFAULT_ACTIVATIONS = first(100) | every(10)
IN_GRAPH = "in-graph"
"""`activations="in-graph"`: those inside compiled regions as well, by an operation in the compiled program."""
DEFAULT_INSPECT = first(20) | every(10)
_MAX_TOLD = 100
_LAST_WORDS_S = 0.5
"""What is left of a deadline for the writer, when snapshots have used up the rest."""


class Session:
    """What `sonde.init` and `sonde.watch` return; a context manager.

    with sonde.init(project="gpt") as session:
        session.watch(model, optimizer)
        train()
    """

    def __init__(self, run: Path, settings: Settings, *, resume: bool = False, is_same_attempt: bool = False) -> None:
        self.path, self.settings = absolute(run), settings
        options = WriterOptions(
            **{**settings.writer.model_dump(), **({} if settings.system_metrics else {"system_interval_s": 0.0})}
        )
        self._num_faults = 0
        self.observers = Observers(LiveRules(self._say_finding) if settings.live_rules else None)
        self.breaker = Breaker(settings.max_errors, self._measurement_failed, self._switch_off)
        self.snapshots = SnapshotTaker(self)
        self.writer = Writer(
            self.path,
            options,
            resume=resume,
            is_same_attempt=is_same_attempt,
            on_warning=self.warn,
            observer=self.observers,
            on_beat=self.snapshots.asks.poll,
        )
        self.position = Position()
        self.is_finished = False
        self._watched_models: list[WatchedModel] = []
        self._watching_lock = threading.RLock()
        self.threads = TrainingThreads(self, self.writer.next_step)
        self.optimizer_hooks: OptimizerHooks | None = None
        self.data: DataInspection | None = None
        self.automatic: Automatic | None = None
        """What finds models by itself, until the program names one."""
        self._at_finish: list[Any] = []
        self.is_logged_ahead = False
        self._told: set[str] = set()
        forks.alive.add(self)
        exits.follow(self._at_exit)
        self._say(f"recording to {shown(self.path)}   (sonde show {self.path.name})")

    # ---------------------------------------------------------------------------------------------------- start-up

    def watch(
        self,
        model: Any,
        optimizer: Any = None,
        *,
        params: Any = True,
        grads: Any = True,
        updates: Any = True,
        optim: Any = True,
        activations: Any = DEFAULT_ACTIVATIONS,
        activation_grads: Any = False,
        inspect: Any = DEFAULT_INSPECT,
        sites: Any = "*",
        when: Any = ALWAYS,
        budget: float | Any | None = ...,
        snapshots: Any = None,
        mirror: Any = None,
        prefix: str = "",
        **others: Any,
    ) -> Session:
        """Record a model's insides. With no optimizer named, any that steps this model's parameters is followed."""
        if self.automatic is not None:
            self.automatic.give_way()
        if self.is_finished:
            raise SessionError(f"this session is finished ({self.path}). Start a new one:  sonde.init(...)")
        from sonde.session.arguments import check_model, check_optimizers, watched_before
        from sonde.session.plan import SCHEDULED, Plan
        from sonde.session.watched_model import WatchedModel

        if others:
            from sonde.session.entry.wandb import translate

            asked = {"params": params, "grads": grads, "updates": updates, "optim": optim, "when": when}
            asked |= translate(others)
            params, grads, updates, optim, when = asked.values()
        default = as_schedule(when, default=ALWAYS, argument="when")

        def schedule(value: Any, argument: str, default: Schedule = default) -> Schedule:
            return as_schedule(value, default=default, argument=argument)

        plan = Plan(
            params=schedule(params, "params"),
            grads=schedule(grads, "grads"),
            updates=schedule(updates, "updates"),
            optim=schedule(optim, "optim"),
            activations=schedule(True if activations == IN_GRAPH else activations, "activations", DEFAULT_ACTIVATIONS),
            activation_grads=schedule(activation_grads, "activation_grads", DEFAULT_ACTIVATIONS),
            inspect=schedule(inspect, "inspect", DEFAULT_INSPECT),
            sites=sites,
            prefix=prefix,
            in_graph=activations == IN_GRAPH,
        )
        if budget is not ...:
            self.threads.set_budget(self.settings.changed(budget=budget).budget)
        checked, optimizers = check_model(model), check_optimizers(optimizer)
        with self._watching_lock:
            replaced = watched_before(checked, prefix, self._watched_models)
            self._tell_taken_over(replaced)
            self.unwatch(replaced)
            self._hook_optimizers()
            watching = WatchedModel(self, checked, optimizers, plan)
            self._watched_models = [*self._watched_models, watching]  # other threads may be going through the old one
            self._keep_snapshots(watching, snapshots)
            if mirror is not None:
                self.observers.add(*mirror_observers(mirror, self.warn))
            self._inspect_data(watching)
        if self.position.is_fresh:
            self.writer.set_step(self.step_number, is_first=True)
        schedules = {name: repr(getattr(plan, name)) for name in SCHEDULED}
        self.writer.note(watching={"schedules": schedules, "activation_rows": self.settings.activation_rows})
        return self

    def _hook_optimizers(self) -> None:
        """One pair of hooks for all models. Not before there is one: a session that logs numbers needs no torch."""
        if self.optimizer_hooks is None:
            from sonde.probe.optimizer.hooks import OptimizerHooks
            from sonde.probe.optimizer.scaler import ScalerTap

            hooks = OptimizerHooks(
                self.breaker,
                on_begin=self._optimizer_begins,
                on_end=self._optimizer_ended,
                on_unseen=partial(warn_of_unseen, self),
            )
            self.optimizer_hooks = hooks
            self._at_finish.append(ScalerTap(hooks.skip, self.breaker).detach)

    def _optimizer_begins(self, call: Call) -> None:
        for training in self.threads.of_call(call):
            training.steps.optimizer_begins(call)

    def _optimizer_ended(self, call: Call) -> None:
        for steps in call.counted_by or [training.steps for training in self.threads.of_call(call)]:
            steps.optimizer_ended(call)

    def _tell_taken_over(self, replaced: Iterable[WatchedModel]) -> None:
        if any(self.threads.is_elsewhere(watching) for watching in replaced):
            self.warn_once(
                "watched in two threads",
                "a model that another thread trains is no longer recorded: one with the same parameter names was "
                'watched in its place. Tell them apart by a name: watch(model, optimizer, prefix="generator.").',
            )

    def _inspect_data(self, watching: WatchedModel) -> None:
        from sonde.session.inspect.data import DataInspection

        if self.data is None:
            self.data = DataInspection(self)
        self.data.follow(watching)

    def _keep_snapshots(self, watching: WatchedModel, snapshots: Any) -> None:
        try:
            self.snapshots.follow(watching, snapshots)
        except BaseException:
            self._watched_models = [other for other in self._watched_models if other is not watching]
            watching.detach()
            raise
        if self.snapshots.training is watching.training:
            self.snapshots.begin_step(watching.training.steps.number)

    def unwatch(self, replaced: Iterable[WatchedModel]) -> None:
        """WatchedModel a model again replaces what was asked for before."""
        for watching in list(replaced):
            watching.detach()
            self._watched_models = [other for other in self._watched_models if other is not watching]
            self.snapshots.unfollow(watching)

    # ------------------------------------------------------------------------------------------------ while it runs

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers at this step. Tensors on a device are not waited for."""
        self.log_for(self.training, values, step)

    def log_for(self, training: TrainingThread, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers that belong to this training thread, whichever thread calls."""
        if self.is_finished:
            self.warn_once(
                "log after finish", "log() after finish() records nothing. Start a new run with sonde.init()."
            )
            return
        try:
            put_logged(self, training, values, step)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("log", error)

    def step(self) -> None:
        """End the step, for loops without a watched optimizer; where one is watched its own steps count."""
        if self.is_finished:
            self.warn_once("step after finish", "step() after finish() records nothing.")
            return
        training = self.training
        with attempt(self.breaker, "step"):
            if not (training.steps.is_counted_by_hooks or training.steps.is_over):
                training.steps.finish()
                training.sweep()
        with attempt(self.breaker, "step"):
            training.steps.close()

    def snapshot(self, kinds: Any = None) -> int | None:
        """Keep whole tensors of the step that comes next, or is being made: its number. None: there will be none.

        Copied while training goes on. Where no step comes any more, `finish` takes it.
        """
        if self.is_finished:
            self.warn_once("snapshot after finish", "snapshot() after finish() keeps nothing.")
            return None
        try:
            return self.snapshots.ask(kinds)
        except UsageError as error:
            self.warn_once(f"snapshot {error}", f"no snapshot: {error}")
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("snapshot", error)
        return None

    def tap(self, name: str, tensor: Any) -> None:
        """Record the sketch of any tensor, under `custom/<name>`."""
        from sonde.session.taps import put_sketches

        self._custom(put_sketches, [(f"{name}", tensor)])

    def batch(self, inputs: Any, targets: Any = None, *, ids: Any = None) -> None:
        """Tell which batch comes next: gives it an identity, and sketches of its tensors as `custom/batch.<n>`."""
        from sonde.session.batches import put_batch

        self._custom(put_batch, inputs, targets, ids)

    def _custom(self, put: Callable[..., None], *args: Any) -> None:
        if self.is_finished:
            self.warn_once("tap after finish", "tap() and batch() after finish() record nothing.")
            return
        try:
            put(self, *args)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("tap", error)

    # ---------------------------------------------------------------------------------------------------- the steps

    @property
    def training(self) -> TrainingThread:
        """Where the steps of the calling thread are counted; for a thread that trains nothing, those of the training
        thread that is furthest ahead. Most programs have only one."""
        return self.threads.current

    @property
    def governing(self) -> BudgetController:
        return self.training.governing

    @property
    def overhead(self) -> float:
        """Share of all time that recording took, as far as is known."""
        if len(self.threads.all) == 1:
            return self.governing.governor.overhead
        return float(self.threads.facts()["fraction"] or 0.0)

    @property
    def step_writer(self) -> StepWriter:
        return self.training.step_writer

    @property
    def step_number(self) -> int:
        """The step that is being made, or that was made last."""
        return self.training.steps.number

    @property
    def is_step_over(self) -> bool:
        """Whether the optimizers have stepped and the next forward pass has not begun."""
        return self.training.steps.is_over

    @property
    def next_step(self) -> int:
        """The number of the step that has not begun yet."""
        return self.step_number + self.is_step_over

    @property
    def watched_models(self) -> list[WatchedModel]:
        return self._watched_models

    def skip_step(self) -> None:
        """The step counts, though the optimizer was kept from it: a scaler found gradients that are not finite."""
        if not self.is_finished:
            with attempt(self.breaker, "skipped step"):
                self.training.steps.skip()

    @property
    def is_fresh(self) -> bool:
        """Whether no step was made yet, and `rewind` has not said which one comes first."""
        return not self.is_finished and not self.is_step_over and self.position.is_new

    def rewind(self, step: int) -> bool:
        """Return to an earlier step after restoring its checkpoint: the next step recorded is this one. Steps recorded
        from there on are abandoned, but stay readable as an earlier attempt. False, with a warning, for other steps."""
        return rewind(self, step)

    # ------------------------------------------------------------------------------------------------- how it ends

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything recorded so far is on disk; False when that took too long."""
        end = time.monotonic() + timeout_s
        for training in self.threads.all:
            training.steps.flush()
        return self.snapshots.flush(timeout_s) and self.writer.flush(max(end - time.monotonic(), 0.0), is_asked=True)

    def finish(self, status: RunStatus = "finished", reason: str = "", *, deadline_s: float | None = None) -> None:
        """Write everything, remove every hook. Safe to call twice."""
        if self.is_finished:
            return
        for watching in self._watched_models if status == "finished" else ():
            with attempt(self.breaker, "finish"):
                watching.unseen_updates.finish()
        self.threads.finish()
        with attempt(self.breaker, "finish"):
            self.note_facts()
        self.is_finished = True
        patience_s = self.settings.exit_deadline_s if self.writer.degraded else self.settings.finish_deadline_s
        self.observers.end = end = time.monotonic() + (deadline_s or patience_s)
        try:
            is_patient = deadline_s is None and not self.writer.degraded
            self.snapshots.finish((deadline_s or patience_s) - _LAST_WORDS_S, status, is_patient=is_patient)
        finally:
            self._detach()
            if deadline_s is None:  # snapshots have taken the time that they needed
                self.observers.end = end = time.monotonic() + patience_s
            self.writer.close(status, reason=reason, deadline_s=max(end - time.monotonic(), _LAST_WORDS_S))
        self._say(final_status(self, status, has_faults=self._num_faults > 0))

    def discard(self) -> None:
        """End the session and remove its run, in which nothing was recorded."""
        self.settings = self.settings.model_copy(update={"verbose": False})
        self.finish("interrupted")
        remove_run(self.path)

    def _detach(self) -> None:
        for watching in self._watched_models:
            watching.detach()
        self._watched_models = []
        if self.data is not None:
            self.data.detach()
        for restore in self._at_finish:
            restore()
        self._at_finish.clear()
        forks.alive.discard(self)
        exits.leave(self._at_exit)

    def on_finish(self, restore: Any) -> None:
        """Call this when the session ends, however it ends."""
        self._at_finish.append(restore)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(*status_of(error), deadline_s=self.settings.exit_deadline_s if error is not None else None)

    def _at_exit(self) -> None:
        """The program ends without `finish`: by its last line, by an exception, or by Ctrl-C."""
        if self.is_finished:
            return
        error = last_error()
        self.writer.note(**{ENDED_AT_EXIT: True})
        self.finish(*status_of(error), deadline_s=self.settings.exit_deadline_s if error is not None else None)
        leave_exit_code(self.path)
        if isinstance(error, KeyboardInterrupt):
            keep_exit_by_signal()

    def _measurement_failed(self, message: str) -> None:
        self.warn(message)
        self.event("measurement_failed", message, severity="warning")

    def _switch_off(self, what: str) -> None:
        self.warn(
            f"switched off after {self.breaker.num_errors} failures of its own, the last in {what}. Training goes on."
        )
        self.event("switched_off", f"sonde switched itself off: {what}", severity="critical")
        self.writer.note(switched_off=what)

    def forked(self) -> None:
        """In a forked child: the run is the parent's."""
        self.is_finished = True
        self.snapshots.forked()
        self.writer.abandon()
        self._detach()

    # ------------------------------------------------------------------------------------------------------- words

    def event(
        self, type: str, message: str, *, severity: Severity = "info", details: dict[str, Any] | None = None
    ) -> None:
        """Record something that happened once."""
        self.writer.event(self._event(type, message, severity, details))

    def _event(self, type: str, message: str, severity: Severity, details: dict[str, Any] | None = None) -> Event:
        at, now = self.step_number, time.time()
        return Event(type=type, message=message, step=at, time=now, severity=severity, details=details or {})

    def warn(self, message: str) -> None:
        """One line on stderr. Not the warnings module: a user's filter may turn warnings into exceptions."""
        print_line(f"sonde: warning: {message}")

    def warn_once(self, key: str, message: str) -> None:
        event = self.warned(key, message)
        if event is not None:
            self.writer.event(event)

    def warned(self, key: str, message: str) -> Event | None:
        """Warn about something once; the event is for the caller to record. None: it is known."""
        if key in self._told or len(self._told) > _MAX_TOLD:
            return None
        self._told.add(key)
        if len(self._told) > _MAX_TOLD:  # names may be made anew in every step
            message = f"more than {_MAX_TOLD} different warnings; further ones are not shown."
        self.warn(message)
        return self._event("warning", message, severity="warning")

    def _say(self, message: str) -> None:
        if self.settings.verbose:
            print_line(f"sonde: {message}")

    def _say_finding(self, finding: Finding) -> None:
        """Called on the writer thread, once for each kind of fault."""
        self._num_faults += 1
        message = "".join(c if c.isprintable() else "?" for c in finding.message)  # names may come from anywhere
        self.snapshots.asks.found(finding)
        self._say(f"{finding.severity} since step {finding.step}: {message}   [{finding.rule}]")

    def note_facts(self) -> None:
        """What a viewer should know of how this was recorded."""
        facts: dict[str, Any] = {"overhead": self.threads.facts()}
        if self._watched_models:
            from sonde.session.coverage import coverage_of

            facts["coverage"] = coverage_of(self._watched_models)
        if self.breaker.num_errors:
            facts["errors"] = self.breaker.num_errors
        self.writer.note(**facts)

    def __reduce__(self) -> tuple[type[NullSession], tuple[()]]:
        """A copy in another process does nothing: the run has one writer."""
        return NullSession, ()

    def __repr__(self) -> str:
        state = "finished" if self.is_finished else f"step {self.step_number}"
        return f"<sonde.Session {self.path} ({state})>"
