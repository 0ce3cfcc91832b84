"""The session that a trainer's callback records to: the user's, or a separate one that ends with the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from sonde.errors import RunError
from sonde.session.entry.current import active_session, begin, check_init, init
from sonde.session.entry.description import as_config
from sonde.session.keywords import RunKeywords, WatchKeywords, check_names, spelled_out
from sonde.session.null import NullSession
from sonde.session.process.ending import status_of
from sonde.session.session import Session
from sonde.write.folder import absolute

AnySession = Session | NullSession


class TrainerSession:
    """Starts, resumes and ends a session on behalf of a trainer.

    `given` is a session, or None; `options` are those of `sonde.init`.
    """

    def __init__(self, given: AnySession | None, options: RunKeywords) -> None:
        """Raises if an option is invalid: training, and its run, start later."""
        check_names(options, RunKeywords, "SondeCallback()")
        check_init(options)
        self._given, self._options = given, options
        self.session: AnySession | None = None
        self._is_own = self._has_failed = False

    def begin(self, config: Mapping[str, Any], *, resume: Path | None = None) -> AnySession:
        """The session: the one passed in, the one of this process, or a new one. Later calls return the same
        session."""
        if self.session is not None and not self.session.is_finished:
            return self.session
        begun = active_session()
        found = self._given if self._given is not None else begun if isinstance(begun, Session) else None
        if found is not None and not found.is_finished:
            self.session, self._is_own = found, False
            return found
        options: RunKeywords = {**self._options, "config": {**config, **as_config(self._options.get("config"))}}
        if resume is not None:
            options["resume"] = str(resume)
        self.session, self._is_own, self._has_failed = init(**options), True, False
        return self.session

    def return_to(self, step: int, run: Path | None = None) -> None:
        """Called when the trainer has loaded a checkpoint: `step` of that run comes next. A checkpoint from elsewhere
        sets the first step of a new run; a session that has already made steps keeps counting them."""
        session = self.session
        if session is None:
            return
        is_its_run = run is not None and session.path in (None, absolute(run))  # other ranks do not know their step
        if session.is_fresh or is_its_run:
            session.rewind(step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers at this step. A finished run of ours also accepts them: many programs evaluate after training."""
        if self.session is None or not values or self._has_failed:
            return
        if isinstance(self.session, Session) and self.session.is_finished:
            self._log_afterwards(self.session, values, step)
        else:
            self.session.log(values, step)

    def _log_afterwards(self, ended: Session, values: Mapping[str, Any], step: int) -> None:
        quietly = ended.settings.model_copy(update={"verbose": False, "live_rules": False})
        try:
            with begin(quietly, resume=str(ended.path), is_same_attempt=True) as session:
                session.log(values, step)
        except RunError as error:  # moved, deleted, or open elsewhere
            ended.recording.warn_once("log afterwards", f"values logged after training are not in its run: {error}")

    def end(self, error: BaseException | None = None) -> None:
        """Finish our own session; the user's session stays open."""
        if self.session is None or not self._is_own:
            return
        self._has_failed = self._has_failed or error is not None
        if isinstance(self.session, Session):
            self.session.finish(*status_of(error))
        else:
            self.session.finish()


class TrainerMixin:
    """The common start of every trainer callback: a session or its options, and the keywords of `watch`."""

    @spelled_out(RunKeywords)
    def __init__(
        self,
        session: AnySession | None = None,
        *,
        watch: WatchKeywords | None = None,
        **init: Unpack[RunKeywords],
    ) -> None:
        super().__init__()
        self.watch: WatchKeywords = watch or {}
        check_names(self.watch, WatchKeywords, "watch()")
        self._joining = TrainerSession(session, init)

    @property
    def session(self) -> AnySession | None:
        """The session, once training has started."""
        return self._joining.session

    def begin_session(self, config: Mapping[str, Any]) -> AnySession:
        """When training begins: the session to record to. `config` is what the trainer knows of its settings."""
        return self._joining.begin(config)

    def log_numbers(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers at this step, also after the end of the training."""
        self._joining.log(values, step)

    def end_session(self, error: BaseException | None = None) -> None:
        """When training has ended, with its error if there is one. A session of the user stays open."""
        self._joining.end(error)
