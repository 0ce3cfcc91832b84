"""The object that `sonde.init` returns: the methods that a training program calls, and nothing else.

Nothing here raises once training runs, except KeyboardInterrupt, which must reach the user's program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

from sonde.config import Settings
from sonde.errors import SessionError, SondeError
from sonde.schema.layout import ENDED_AT_EXIT, ERROR, RunStatus
from sonde.schema.mutes import MUTE, parse_mutes
from sonde.schema.words import recording_took
from sonde.session.keywords import Optimizers, WatchKeywords, spelled_out, watch_keywords, with_defaults
from sonde.session.model.keras_models import is_fitted, keras_adapter
from sonde.session.null import NullSession
from sonde.session.observers.mirror import Observers, mirror_observers
from sonde.session.observers.rules import Announcement, Change
from sonde.session.observers.rules_process import RulesProcess
from sonde.session.process import forks
from sonde.session.process.ending import dashboard_command, describe, keep_exit_by_signal, last_error, shown, status_of
from sonde.session.process.exits import exits
from sonde.session.recording import Recording
from sonde.session.scalars import log_values
from sonde.session.training_step import StepRecorder
from sonde.write.ending import leave_exit_code
from sonde.write.folder import absolute, remove_run
from sonde.write.ranks import RankEvents

if TYPE_CHECKING:
    from torch import nn

    from sonde.diagnose.finding import Finding
    from sonde.session.plan import WatchRequest

_LAST_WORDS_S: Final = 0.5
"""The time reserved for the writer when snapshots have used up the rest of a deadline."""


class Session:
    """One run, from `sonde.init` to `finish`; a context manager.

    with sonde.init(project="gpt") as session:
        session.watch(model, optimizer)
        train()

    `recording` and `steps` are for integrations: the writer and the step count, and the work done in each step.
    """

    def __init__(
        self,
        run: Path,
        settings: Settings,
        *,
        resume: bool = False,
        is_same_attempt: bool = False,
        rank: int = 0,
        first_step: int | None = None,
    ) -> None:
        began_s = time.perf_counter()
        self._finish_s = 0.0
        """When `finish` was called."""
        self._num_faults = 0
        self._is_new = not resume
        self._is_refused = False
        """Whether `watch` was called with invalid arguments: if the program then ends, the run is empty."""
        self._tell_snapshots: Callable[[Finding], None] | None = None
        others = RankEvents(absolute(run))
        rules = RulesProcess(self._say_finding, lambda: observers.end, others) if settings.live_rules else None
        observers = Observers(rules)
        self.recording = Recording(
            absolute(run),
            settings,
            observers,
            resume=resume,
            is_same_attempt=is_same_attempt,
            rank=rank,
            first_step=first_step,
        )
        self.recording.writer.note(**{MUTE: [mute.as_dict() for mute in parse_mutes(settings.mute)]})
        self.steps = StepRecorder(self.recording)
        self.defaults: dict[str, Any] = {**watch_keywords(settings)}
        """Keywords of `watch` for models that are watched without them: the setting `record`, and those of a
        decorator."""
        self.overrides: Mapping[str, Any] = {}
        """Keywords of `watch` from the command line, which no call changes."""
        self._tell_snapshots = self.steps.snapshots.asks.found
        self.on_watch: Callable[[], None] | None = None
        """Called when the program watches a model: automatic model search then stops."""
        forks.alive.add(self)
        exits.follow(self._at_exit)
        self.recording.say(f"recording to {shown(self.path)}   (sonde show {self.path.name})")
        self.recording.ledger.begin(began_s)

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
        """The current step, or the last one that was made."""
        return self.recording.step_number

    @property
    def next_step(self) -> int:
        """The number of the next step."""
        return self.recording.next_step

    @property
    def is_fresh(self) -> bool:
        """Whether no step was made yet, and `rewind` has not set the first one."""
        return not self.is_finished and not self.recording.is_step_over and self.steps.threads.position.is_new

    @property
    def is_empty(self) -> bool:
        """Whether nothing was trained: no step was made and no backward pass seen."""
        return self.is_fresh and not (self.steps.hooks is not None and self.steps.data.training.has_trained)

    @property
    def overhead(self) -> float:
        """Fraction of all time that recording took, as far as it is known."""
        return self.steps.overhead

    # --------------------------------------------------------------------------------------------------- what to record

    @spelled_out(WatchKeywords)
    def watch(self, model: nn.Module, optimizer: Optimizers = None, **keywords: Unpack[WatchKeywords]) -> Session:
        """Record what happens inside a model. Without an optimizer, every one that updates its parameters is
        followed. `sonde.watch` describes the keywords. Of a compiled Keras model, every `fit` is recorded."""
        try:
            if is_fitted(model, optimizer):
                keras_adapter().watch_model(model, self, keywords)
                return self
            from sonde.session.plan import WatchRequest

            return self._watch(WatchRequest.of(model, optimizer, with_defaults(self, keywords)))
        except SondeError:
            self._is_refused = True
            raise

    def _watch(self, request: WatchRequest) -> Session:
        began_s = time.perf_counter()
        if self.on_watch is not None:
            self.on_watch()
        if self.is_finished:
            raise SessionError(f"this session is finished ({self.path}). Start a new one:  sonde.init(...)")
        if request.budget:
            self.recording.ledger.fraction = request.budget["budget"]
        self.steps.watch(request.model, request.optimizers, request.plan, request.snapshots)
        self.recording.observers.add(*mirror_observers(request.mirrors, self.recording.warn))
        self.recording.ledger.spend("attach", time.perf_counter() - began_s)
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers at this step. Tensors on a device are not waited for."""
        try:
            training = self.steps.training
            with training.governing.meter.span(""):
                log_values(self.recording, training, values, step)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker("log", error)

    def tap(self, name: str, tensor: Any) -> None:
        """Record a sketch of any tensor, under `custom/<name>`."""
        from sonde.session.taps import put_sketches

        if self._is_open("tap", "tap() and batch() after finish() record nothing."):
            self._do("tap", lambda: put_sketches(self.recording, self.steps.training, [(f"{name}", tensor)]))

    def batch(self, inputs: Any, targets: Any = None, *, ids: Any = None) -> None:
        """Announce the next batch: gives it an identity, and records sketches of its tensors as `custom/batch.<n>`."""
        from sonde.session.data.batches import put_batch

        if self._is_open("tap", "tap() and batch() after finish() record nothing."):
            steps, data = self.steps, self.steps.data if self.steps.hooks is not None else None
            self._do("tap", lambda: put_batch(self.recording, steps.threads, data, inputs, targets, ids))

    def snapshot(self, kinds: str | Iterable[str] | None = None) -> int | None:
        """Keep whole tensors of the next or current step. Returns its number, or None if there will be no snapshot.

        Copied while training continues. If no further step follows, `finish` takes it.
        """
        if not self._is_open("snapshot", "snapshot() after finish() keeps nothing."):
            return None
        return self.steps.snapshot(kinds)

    # ------------------------------------------------------------------------------------------------------------ steps

    def step(self) -> None:
        """End the step, in a loop without a watched optimizer; with a watched one, its own steps count."""
        if self._is_open("step", "step() after finish() records nothing."):
            self._do("step", self.steps.end_by_user)

    def skip_step(self) -> None:
        """Count a step that the optimizer skipped because a gradient scaler found non-finite gradients."""
        if not self.is_finished:
            self.steps.skip()

    def rewind(self, step: int) -> bool:
        """Return to an earlier step after restoring its checkpoint; it is the next step recorded. Steps recorded from
        there on are abandoned, but stay readable as an earlier attempt. An invalid step causes a warning and returns
        False."""
        if not self._is_open("rewind", "rewind() after finish() does nothing."):
            return False
        try:
            return self.steps.rewind(step)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker("rewind", error)
            return False

    # ----------------------------------------------------------------------------------------------------------- ending

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything recorded so far is on disk; False if that took too long."""
        end = time.monotonic() + timeout_s
        self.steps.flush()
        if not self.steps.snapshots.flush(timeout_s):
            return False
        return self.recording.writer.flush(max(end - time.monotonic(), 0.0), is_asked=True)

    def finish(self, status: RunStatus = "finished", reason: str = "", *, deadline_s: float | None = None) -> None:
        """Write everything and remove every hook. Safe to call twice."""
        if self.is_finished:
            return
        if status != "finished" and self._is_refused and self._is_empty:
            self._discard()
            return
        recording, steps, settings = self.recording, self.steps, self.settings
        self._finish_s = time.perf_counter()
        recording.ledger.thread_clock.stop()
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
            left_s = max(end - time.monotonic(), _LAST_WORDS_S)
            recording.writer.close(status, reason=reason, deadline_s=left_s, last_facts=self._last_facts)
        recording.ledger.finish(self._finish_s)
        recording.say(self._last_line(status))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def __reduce__(self) -> tuple[type[NullSession], tuple[()]]:
        """A copy in another process does nothing: a run has one writer."""
        return NullSession, ()

    def __repr__(self) -> str:
        state = "finished" if self.is_finished else f"step {self.step_number}"
        return f"<sonde.Session {self.path} ({state})>"

    def _repr_html_(self) -> str:
        """For a notebook: the state of the session, and how to open its run. Reads nothing back."""
        num, folder = self._num_faults, shown(self.path)
        facts = [
            "finished" if self.is_finished else f"recording, step {self.step_number:,}",
            f"overhead {self.overhead:.1%}",
            *([f"{num} kind{'' if num == 1 else 's'} of problem found"] if num else []),
        ]
        code = escape(f"sonde.open({folder!r})")
        return f"<div><b>{escape(self.path.name)}</b>: {', '.join(facts)}. Open it with <code>{code}</code></div>"

    # -------------------------------------------------------------------------------------------------------- internals

    def _is_open(self, what: str, message: str) -> bool:
        """Whether the session still records; warns once if it does not."""
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
        if not self.is_finished:
            self._do("finish", lambda: self.recording.writer.note(**{ERROR: describe(error), "reason": reason}))
        self.finish(status, reason, deadline_s=None if status == "finished" else self.settings.exit_deadline_s)

    @property
    def _is_empty(self) -> bool:
        """Whether this session has started its run, and nothing was recorded yet."""
        return self._is_new and self.is_fresh and self.recording.writer.is_empty

    def _discard(self) -> None:
        """End the session and remove its run, in which nothing was recorded."""
        self._is_refused = False
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
        """Called in a forked child: the run belongs to the parent."""
        self.recording.is_finished = True
        self.steps.snapshots.forked()
        self.recording.writer.abandon()
        self._detach()

    def _at_exit(self) -> None:
        """Called when the program ends without `finish`: at its last line, by an exception, or by Ctrl-C."""
        if self.is_finished:
            return
        error = last_error()
        self.recording.writer.note(**{ENDED_AT_EXIT: True})
        self._end(error)
        leave_exit_code(self.path)
        if isinstance(error, KeyboardInterrupt):
            keep_exit_by_signal()

    def _say_finding(self, said: Announcement) -> None:
        """Called on the writer thread, once for each rule with a finding, and when that turns out differently."""
        finding, change = said
        message = "".join(c if c.isprintable() else "?" for c in finding.message)  # names may contain any character
        since = f"since step {finding.step}: {message}   [{finding.rule}]"
        if change in (Change.NEW, Change.CORRECTED) and self._tell_snapshots is not None:
            self._tell_snapshots(finding)
        if change == Change.NEW:
            self._num_faults += 1
            self.recording.say(f"{finding.severity} {since}")
        elif change == Change.CORRECTED:
            self.recording.say(f"correction: {finding.severity} {since}")
        elif change == Change.EXPLAINED:
            self.recording.say(f"correction: a consequence of another finding: {message}   [{finding.rule}]")
        else:
            self.recording.say(f"no longer so after step {finding.last_step}: {message}   [{finding.rule}]")

    def _last_facts(self) -> dict[str, Any]:
        """Called on the writer thread, when only these facts are left to write."""
        self.recording.ledger.finish(self._finish_s)
        return {"overhead": self.steps.threads.facts()}

    def _last_line(self, status: RunStatus) -> str:
        """A summary of the run, the cost of recording, missing data, and the commands to continue with."""
        is_known, writer = self.steps.training.steps.is_count_known, self.recording.writer
        num = self.step_number
        steps = f": {num} step{'' if num == 1 else 's'}" if is_known else "; steps were not counted"
        parts = [f"{status.capitalize()}{steps}"]
        parts += filter(None, [recording_took(self.steps.threads.facts())])
        dropped = sum(writer.dropped.values())
        if dropped:
            parts.append(f"{dropped} records were dropped")
        if not writer.is_done:
            parts.append("The disk was too slow to confirm the last records")
        elif writer.degraded:
            parts.append(f"Not everything could be written: {writer.degraded}")
        return f"{'. '.join(parts)}.   Next:  sonde diagnose {shown(self.path)}  or  {dashboard_command(self.path)}"
