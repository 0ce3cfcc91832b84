"""What `sonde.init` returns: the methods that a training program calls, and nothing else.

Nothing here raises once training runs, except what the user did not ask us to survive: KeyboardInterrupt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from sonde.config import Settings
from sonde.errors import SessionError
from sonde.probe.schedule import ALWAYS, DEFAULT_ACTIVATIONS, DEFAULT_INSPECT
from sonde.schema.layout import ENDED_AT_EXIT, RunStatus
from sonde.session.null import NullSession
from sonde.session.observers.mirror import Observers, mirror_observers
from sonde.session.observers.rules import LiveRules
from sonde.session.process import forks
from sonde.session.process.ending import keep_exit_by_signal, last_error, shown, status_of
from sonde.session.process.exits import exits
from sonde.session.recording import Recording
from sonde.session.scalars import log_values
from sonde.session.training_step import StepRecorder
from sonde.write.ending import leave_exit_code
from sonde.write.folder import absolute, remove_run

if TYPE_CHECKING:
    from sonde.diagnose.finding import Finding

_LAST_WORDS_S: Final = 0.5
"""What is left of a deadline for the writer, when snapshots have used up the rest."""


class Session:
    """One run, from `sonde.init` to `finish`; a context manager.

    with sonde.init(project="gpt") as session:
        session.watch(model, optimizer)
        train()

    `recording` and `steps` are for integrations: the writer and the count of steps, and what is done in each step.
    """

    def __init__(self, run: Path, settings: Settings, *, resume: bool = False, is_same_attempt: bool = False) -> None:
        self._num_faults = 0
        self._tell_snapshots: Callable[[Finding], None] | None = None
        observers = Observers(LiveRules(self._say_finding) if settings.live_rules else None)
        self.recording = Recording(absolute(run), settings, observers, resume=resume, is_same_attempt=is_same_attempt)
        self.steps = StepRecorder(self.recording)
        self._tell_snapshots = self.steps.snapshots.asks.found
        self.on_watch: Callable[[], None] | None = None
        """Called when the program watches a model: whatever finds models by itself gives way."""
        forks.alive.add(self)
        exits.follow(self._at_exit)
        self.recording.say(f"recording to {shown(self.path)}   (sonde show {self.path.name})")

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.recording.path

    @property
    def settings(self) -> Settings:
        return self.recording.settings

    @property
    def is_finished(self) -> bool:
        return self.recording.is_finished

    @property
    def step_number(self) -> int:
        """The step that is being made, or that was made last."""
        return self.recording.step_number

    @property
    def next_step(self) -> int:
        """The number of the step that has not begun yet."""
        return self.recording.next_step

    @property
    def is_fresh(self) -> bool:
        """Whether no step was made yet, and `rewind` has not said which one comes first."""
        return not self.is_finished and not self.recording.is_step_over and self.steps.threads.position.is_new

    @property
    def overhead(self) -> float:
        """Share of all time that recording took, as far as is known."""
        return self.steps.overhead

    # ------------------------------------------------------------------------------------------------- what to record

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
        if self.on_watch is not None:
            self.on_watch()
        if self.is_finished:
            raise SessionError(f"this session is finished ({self.path}). Start a new one:  sonde.init(...)")
        from sonde.session.plan import Plan, check_model, check_optimizers

        plan = Plan.of(
            params=params,
            grads=grads,
            updates=updates,
            optim=optim,
            activations=activations,
            activation_grads=activation_grads,
            inspect=inspect,
            sites=sites,
            when=when,
            prefix=prefix,
            **others,
        )
        if budget is not ...:
            self.steps.threads.set_budget(self.settings.changed(budget=budget).budget)
        self.steps.watch(check_model(model), check_optimizers(optimizer), plan, snapshots)
        if mirror is not None:
            self.recording.observers.add(*mirror_observers(mirror, self.recording.warn))
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers at this step. Tensors on a device are not waited for."""
        try:
            log_values(self.recording, self.steps.training, values, step)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker("log", error)

    def tap(self, name: str, tensor: Any) -> None:
        """Record the sketch of any tensor, under `custom/<name>`."""
        from sonde.session.taps import put_sketches

        if self._is_open("tap", "tap() and batch() after finish() record nothing."):
            self._do("tap", lambda: put_sketches(self.recording, self.steps.training, [(f"{name}", tensor)]))

    def batch(self, inputs: Any, targets: Any = None, *, ids: Any = None) -> None:
        """Tell which batch comes next: gives it an identity, and sketches of its tensors as `custom/batch.<n>`."""
        from sonde.session.data.batches import put_batch

        if self._is_open("tap", "tap() and batch() after finish() record nothing."):
            steps, data = self.steps, self.steps.data if self.steps.hooks is not None else None
            self._do("tap", lambda: put_batch(self.recording, steps.threads, data, inputs, targets, ids))

    def snapshot(self, kinds: Any = None) -> int | None:
        """Keep whole tensors of the step that comes next, or is being made: its number. None: there will be none.

        Copied while training continues. If no further step follows, `finish` takes it.
        """
        if not self._is_open("snapshot", "snapshot() after finish() keeps nothing."):
            return None
        return self.steps.snapshot(kinds)

    # ---------------------------------------------------------------------------------------------------- the steps

    def step(self) -> None:
        """End the step, for loops without a watched optimizer; where one is watched its own steps count."""
        if self._is_open("step", "step() after finish() records nothing."):
            self._do("step", self.steps.end_by_user)

    def skip_step(self) -> None:
        """The step counts, though the optimizer was kept from it: a scaler found gradients that are not finite."""
        if not self.is_finished:
            self.steps.skip()

    def rewind(self, step: int) -> bool:
        """Return to an earlier step after restoring its checkpoint: the next step recorded is this one. Steps recorded
        from there on are abandoned, but stay readable as an earlier attempt. False, with a warning, for other steps."""
        if not self._is_open("rewind", "rewind() after finish() does nothing."):
            return False
        try:
            return self.steps.rewind(step)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker("rewind", error)
            return False

    # ------------------------------------------------------------------------------------------------- how it ends

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything recorded so far is on disk; False when that took too long."""
        end = time.monotonic() + timeout_s
        self.steps.flush()
        if not self.steps.snapshots.flush(timeout_s):
            return False
        return self.recording.writer.flush(max(end - time.monotonic(), 0.0), is_asked=True)

    def finish(self, status: RunStatus = "finished", reason: str = "", *, deadline_s: float | None = None) -> None:
        """Write everything, remove every hook. Safe to call twice."""
        if self.is_finished:
            return
        recording, steps, settings = self.recording, self.steps, self.settings
        if status == "finished":
            steps.warn_of_uncounted()
        steps.finish()
        self._do("finish", steps.note_facts)
        recording.is_finished = True
        patience_s = settings.exit_deadline_s if recording.writer.degraded else settings.finish_deadline_s
        recording.observers.end = end = time.monotonic() + (deadline_s or patience_s)
        try:
            is_patient = deadline_s is None and not recording.writer.degraded
            steps.snapshots.finish((deadline_s or patience_s) - _LAST_WORDS_S, status, is_patient=is_patient)
        finally:
            self._detach()
            if deadline_s is None:  # snapshots have taken the time that they needed
                recording.observers.end = end = time.monotonic() + patience_s
            recording.writer.close(status, reason=reason, deadline_s=max(end - time.monotonic(), _LAST_WORDS_S))
        recording.say(self._last_line(status))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def __reduce__(self) -> tuple[type[NullSession], tuple[()]]:
        """A copy in another process does nothing: the run has one writer."""
        return NullSession, ()

    def __repr__(self) -> str:
        state = "finished" if self.is_finished else f"step {self.step_number}"
        return f"<sonde.Session {self.path} ({state})>"

    # ------------------------------------------------------------------------------------------------------- inside

    def _is_open(self, what: str, message: str) -> bool:
        """Whether the session still records; if not, that is said once."""
        if self.is_finished:
            self.recording.warn_once(f"{what} after finish", message)
        return not self.is_finished

    def _do(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker(what, error)

    def _end(self, error: BaseException | None) -> None:
        """Finish with the status of this error. `sys.exit(0)` is not one, and has no short deadline."""
        status, reason = status_of(error)
        self.finish(status, reason, deadline_s=None if status == "finished" else self.settings.exit_deadline_s)

    def _discard(self) -> None:
        """End the session and remove its run, in which nothing was recorded."""
        self.recording.settings = self.settings.model_copy(update={"verbose": False})
        self.finish("interrupted")
        remove_run(self.path)

    def _detach(self) -> None:
        self.steps.detach()
        for restore in self.recording.at_finish:
            restore()
        self.recording.at_finish.clear()
        forks.alive.discard(self)
        exits.leave(self._at_exit)

    def _forked(self) -> None:
        """In a forked child: the run is the parent's."""
        self.recording.is_finished = True
        self.steps.snapshots.forked()
        self.recording.writer.abandon()
        self._detach()

    def _at_exit(self) -> None:
        """The program ends without `finish`: by its last line, by an exception, or by Ctrl-C."""
        if self.is_finished:
            return
        error = last_error()
        self.recording.writer.note(**{ENDED_AT_EXIT: True})
        self._end(error)
        leave_exit_code(self.path)
        if isinstance(error, KeyboardInterrupt):
            keep_exit_by_signal()

    def _say_finding(self, finding: Finding) -> None:
        """Called on the writer thread, once for each kind of fault."""
        self._num_faults += 1
        message = "".join(c if c.isprintable() else "?" for c in finding.message)  # names may come from anywhere
        if self._tell_snapshots is not None:
            self._tell_snapshots(finding)
        self.recording.say(f"{finding.severity} since step {finding.step}: {message}   [{finding.rule}]")

    def _last_line(self, status: RunStatus) -> str:
        """How it went, what it cost, what is missing, and where to look."""
        is_known, writer = self.steps.training.steps.is_count_known, self.recording.writer
        parts = [f"{status} after {self.step_number} steps" if is_known else f"{status}; its steps were not counted"]
        if self.overhead:
            parts.append(f"{self.overhead:.1%} of the time was sonde's")
        dropped = sum(writer.dropped.values())
        if dropped:
            parts.append(f"{dropped} records dropped")
        if not writer.is_done:
            parts.append("the disk was too slow to confirm the last records")
        elif writer.degraded:
            parts.append(f"not everything could be written: {writer.degraded}")
        return f"{', '.join(parts)}.   sonde {'diagnose' if self._num_faults else 'show'} {shown(self.path)}"
