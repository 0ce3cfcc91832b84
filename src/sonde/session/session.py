"""One recording: counts steps, takes logged numbers, keeps the watched models, and ends truthfully.

Nothing here raises once training runs, except what the user did not ask us to survive: KeyboardInterrupt.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sonde.config import Settings
from sonde.errors import SessionError, UsageError
from sonde.probe.schedule import ALWAYS, Schedule, as_schedule, every, first
from sonde.record.writer import Writer, WriterOptions
from sonde.schema.layout import RunStatus
from sonde.schema.records import Event, Severity
from sonde.session.breaker import Breaker
from sonde.session.ending import farewell, keep_exit_by_signal, status_of
from sonde.session.governing import Governing
from sonde.session.live import LiveRules
from sonde.session.logged import put_logged
from sonde.session.mirror import Observers, mirrorings
from sonde.session.null import NullSession
from sonde.session.snapshots import Snapshotting

if TYPE_CHECKING:
    from sonde.diagnose.finding import Finding
    from sonde.session.inspection_data import DataInspection
    from sonde.session.watching import Watching

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

    def __init__(self, run: Path, settings: Settings, *, resume: bool = False) -> None:
        self.path, self.settings = run, settings
        options = WriterOptions(
            **{**settings.writer.model_dump(), **({} if settings.system else {"system_interval_s": 0.0})}
        )
        self._num_faults = 0
        self.observers = Observers(LiveRules(self._say_finding) if settings.diagnose else None)
        self.breaker = Breaker(settings.max_errors, self.warn, self._switch_off)
        self.snapshots = Snapshotting(self)
        self.writer = Writer(
            run, options, resume=resume, on_warning=self.warn, observer=self.observers, on_beat=self.snapshots.asks.poll
        )
        self.step_number = self.writer.next_step
        self.governing = Governing(self)
        self.is_finished = False
        self._watchings: list[Watching] = []
        self.data: DataInspection | None = None
        self._at_finish: list[Any] = []
        self._is_step_over = False
        self._is_optimizer_seen = False
        self.is_logged_ahead = False
        self._step_began_s = time.perf_counter()
        self._told: set[str] = set()
        _alive.add(self)
        atexit.register(self._at_exit)
        self._say(f"recording to {run}   (sonde show {run.name})")

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
        if self.is_finished:
            raise SessionError(f"this session is finished ({self.path}). Start a new one:  sonde.init(...)")
        from sonde.session.given import check_model, check_optimizers, watched_before
        from sonde.session.plan import SCHEDULED, Plan
        from sonde.session.watching import Watching

        if others:
            from sonde.session.wandb_words import in_our_words

            asked = {"params": params, "grads": grads, "updates": updates, "optim": optim, "when": when}
            asked |= in_our_words(others)
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
            self.governing.governor.budget = Settings.load(budget=budget).budget
        checked, optimizers = check_model(model), check_optimizers(optimizer)
        self._unwatch(watched_before(checked, prefix, self._watchings))
        self._watchings.append(Watching(self, checked, optimizers, plan))
        self._keep_snapshots(self._watchings[-1], snapshots)
        if mirror is not None:
            self.observers.add(*mirrorings(mirror, self.warn))
        self._inspect_data(self._watchings[-1])
        schedules = {name: repr(getattr(plan, name)) for name in SCHEDULED}
        self.writer.note(watching={"schedules": schedules, "activation_rows": self.settings.activation_rows})
        return self

    def _inspect_data(self, watching: Watching) -> None:
        from sonde.session.inspection_data import DataInspection

        if self.data is None:
            self.data = DataInspection(self)
        self.data.follow(watching)

    def _keep_snapshots(self, watching: Watching, snapshots: Any) -> None:
        try:
            self.snapshots.follow(watching, snapshots)
        except BaseException:
            self._watchings.remove(watching)
            watching.detach()
            raise
        self.snapshots.begin_step(self.step_number)

    def _unwatch(self, replaced: Iterable[Watching]) -> None:
        """Watching a model again replaces what was asked for before."""
        for watching in replaced:
            watching.detach()
            self._watchings.remove(watching)
            self.snapshots.unfollow(watching)

    # ------------------------------------------------------------------------------------------------ while it runs

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers at this step. Tensors on a device are not waited for."""
        if self.is_finished:
            self.warn_once(
                "log after finish", "log() after finish() records nothing. Start a new run with sonde.init()."
            )
            return
        try:
            put_logged(self, values, step)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("log", error)

    def step(self) -> None:
        """End the step, for loops without a watched optimizer; where one is watched its own steps count."""
        if self.is_finished:
            self.warn_once("step after finish", "step() after finish() records nothing.")
            return
        try:
            if self._is_optimizer_seen:
                self.end_step()
            else:
                for watching in self._watchings:
                    watching.sweep()
                self.snapshots.step_over()
                self._describe_models()
                self._is_step_over = True
                self.end_step()
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("step", error)

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
        from sonde.session.custom import put_sketches

        self._custom(put_sketches, [(str(name), tensor)])

    def batch(self, inputs: Any, targets: Any = None, *, ids: Any = None) -> None:
        """Tell which batch comes next: gives it an identity, and sketches of its tensors as `custom/batch.<n>`."""
        from sonde.session.told import put_batch

        self._custom(put_batch, inputs, targets, ids)

    def _custom(self, put: Callable[..., None], *args: Any) -> None:
        if self.is_finished:
            self.warn_once("tap after finish", "tap() and batch() after finish() record nothing.")
            return
        try:
            put(self, *args)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("tap", error)

    # --------------------------------------------------------------------------------------- what the taps tell us

    def forward_seen(self) -> None:
        """A training forward after an optimizer step belongs to the next step; so does what is logged from now on."""
        if self._is_step_over:
            self.end_step()

    def optimizer_seen(self) -> None:
        self._is_optimizer_seen = True
        if self._is_step_over:
            self.end_step()

    def have_all_stepped(self) -> bool:
        """Several watched models, such as those of a GAN, make one step together."""
        return all(watching.has_stepped for watching in self._watchings)

    def optimizer_stepped(self) -> None:
        """All watched optimizers have stepped. The step stays open for `log` until the next one shows itself."""
        self._emit()
        self.snapshots.step_over()
        self._describe_models()
        self._is_step_over = True

    def _describe_models(self) -> None:
        """model.json, if what it says has changed."""
        if self._watchings:
            from sonde.session.structure import write_structure

            write_structure(self, self._watchings)

    @property
    def is_step_over(self) -> bool:
        """Whether the optimizers have stepped and the next forward pass has not begun."""
        return self._is_step_over

    @property
    def watchings(self) -> list[Watching]:
        return self._watchings

    def _emit(self) -> None:
        for watching in self._watchings:
            watching.emit(self.step_number)
        if self.data is not None:
            self.data.emit(self.step_number)

    def end_step(self) -> None:
        """Count the step and decide what the next one records."""
        if not self._is_step_over and self._is_optimizer_seen:
            return
        now = time.perf_counter()
        self._emit()
        if self.data is not None:
            # Batches are told apart in every step, which nothing thins out.
            self.governing.meter.add("inspect" if self.data.is_inspecting else "", self.data.own_s)
            self.data.own_s = 0.0
        self.governing.end_step(self.step_number, now - self._step_began_s)
        self._step_began_s, self._is_step_over = now, False
        self.step_number += 1
        self.writer.set_step(self.step_number)
        for watching in self._watchings:
            watching.begin_step(self.step_number)
        self.snapshots.begin_step(self.step_number)
        if self.step_number % 100 == 1:
            self._note_facts()

    def skip_step(self) -> None:
        """The step counts, though the optimizer was kept from it: a scaler found gradients that are not finite."""
        if not self.is_finished and not self._is_step_over:
            self._is_step_over = True
            self.end_step()

    @property
    def next_step(self) -> int:
        """The number of the step that has not begun yet."""
        return self.step_number + self._is_step_over

    @property
    def is_fresh(self) -> bool:
        """Whether this process has not made a step yet."""
        return not self.is_finished and not self._is_step_over and self.step_number == self.writer.next_step

    def continue_at(self, step: int, scalars: Iterable[tuple[str, int]] = ()) -> bool:
        """A checkpoint was restored, whose next step is this one. False where this process has made steps already: then
        the numbers go on. What an earlier process recorded behind the checkpoint, these scalars among it, is not
        recorded twice."""
        if not self.is_fresh:
            return False
        self.writer.skip_repeats(scalars)
        self.step_number = step
        self.writer.set_step(step)
        for watching in self._watchings:
            watching.begin_step(step)
        self.snapshots.begin_step(step)
        return True

    # ------------------------------------------------------------------------------------------------- how it ends

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything recorded so far is on disk; False when that took too long."""
        end = time.monotonic() + timeout_s
        return self.snapshots.flush(timeout_s) and self.writer.flush(max(end - time.monotonic(), 0.0))

    def finish(self, status: RunStatus = "finished", reason: str = "", *, deadline_s: float | None = None) -> None:
        """Write everything, remove every hook. Safe to call twice."""
        if self.is_finished:
            return
        try:
            if self._is_step_over:
                self.end_step()
            self._emit()
            self._note_facts()
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("finish", error)
        self.is_finished = True
        patience_s = self.settings.exit_deadline_s if self.writer.degraded else self.settings.finish_deadline_s
        end = time.monotonic() + (deadline_s or patience_s)
        self._finish_snapshots(status, end)
        self._detach()
        atexit.unregister(self._at_exit)
        self.writer.close(status, reason=reason, deadline_s=max(end - time.monotonic(), _LAST_WORDS_S))
        self._say(farewell(self, status, has_faults=self._num_faults > 0))

    def _finish_snapshots(self, status: RunStatus, end: float) -> None:
        try:
            left_s = max(end - time.monotonic() - _LAST_WORDS_S, 0.0)
            self.snapshots.finish(left_s, is_crash=status == "crashed")
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.breaker("snapshots", error)

    def _detach(self) -> None:
        for watching in self._watchings:
            watching.detach()
        self._watchings.clear()
        if self.data is not None:
            self.data.detach()
        for restore in self._at_finish:
            restore()
        self._at_finish.clear()
        _alive.discard(self)

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
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if hasattr(sys, "ps1"):
            error = None  # in an interactive session an old error says nothing about the end
        self.finish(*status_of(error), deadline_s=self.settings.exit_deadline_s if error is not None else None)
        if isinstance(error, KeyboardInterrupt):
            keep_exit_by_signal()

    def _switch_off(self, what: str) -> None:
        self.warn(
            f"switched off after {self.breaker.num_errors} failures of its own, the last in {what}. Training goes on."
        )
        self.event("switched_off", f"sonde switched itself off: {what}", severity="critical")
        self.writer.note(switched_off=what)

    def forked(self) -> None:
        """In a forked child: the run is the parent's."""
        self.is_finished = True
        atexit.unregister(self._at_exit)
        self.snapshots.forked()
        self.writer.abandon()
        self._detach()

    # ------------------------------------------------------------------------------------------------------- words

    def event(
        self, type: str, message: str, *, severity: Severity = "info", details: dict[str, Any] | None = None
    ) -> None:
        """Record something that happened once."""
        self.writer.event(
            Event(
                type=type,
                message=message,
                step=self.step_number,
                time=time.time(),
                severity=severity,
                details=details or {},
            )
        )

    def warn(self, message: str) -> None:
        """One line on stderr. Not the warnings module: a user's filter may turn warnings into exceptions."""
        _print(f"sonde: warning: {message}")

    def warn_once(self, key: str, message: str) -> None:
        if key not in self._told and len(self._told) < _MAX_TOLD:  # names may be made anew in every step
            self._told.add(key)
            self.warn(message)
            self.event("warning", message, severity="warning")

    def _say(self, message: str) -> None:
        if self.settings.verbose:
            _print(f"sonde: {message}")

    def _say_finding(self, finding: Finding) -> None:
        """Called on the writer thread, once for each kind of fault."""
        self._num_faults += 1
        message = "".join(c if c.isprintable() else "?" for c in finding.message)  # names may come from anywhere
        self.snapshots.asks.found(finding)
        self._say(f"{finding.severity} since step {finding.step}: {message}   [{finding.rule}]")

    def _note_facts(self) -> None:
        facts: dict[str, Any] = {"overhead": self.governing.facts()}
        if self._watchings:
            facts["coverage"] = _together([watching.coverage() for watching in self._watchings])
        if self.breaker.num_errors:
            facts["errors"] = self.breaker.num_errors
        self.writer.note(**facts)

    def __reduce__(self) -> tuple[type[NullSession], tuple[()]]:
        """A copy in another process does nothing: the run has one writer."""
        return NullSession, ()

    def __repr__(self) -> str:
        state = "finished" if self.is_finished else f"step {self.step_number}"
        return f"<sonde.Session {self.path} ({state})>"


def _together(coverages: list[dict[str, Any]]) -> dict[str, Any]:
    """What several watched models add up to: counts, lists and mappings alike."""
    total = coverages[0]
    for coverage in coverages[1:]:
        for key, value in coverage.items():
            total[key] = {**total[key], **value} if isinstance(value, dict) else total[key] + value
    return total


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return  # a closed stderr is no reason to stop, and there is nobody to tell


_alive: weakref.WeakSet[Session] = weakref.WeakSet()


def _forget_in_child() -> None:
    for session in list(_alive):
        session.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
