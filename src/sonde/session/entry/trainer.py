"""The session that a trainer's callback records to: the one the user has begun, or one of its own that ends with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde.errors import RunError
from sonde.session.entry.current import active_session, begin, init
from sonde.session.null import NullSession
from sonde.session.process.ending import status_of
from sonde.session.session import Session
from sonde.write.folder import absolute

AnySession = Session | NullSession


class TrainerSession:
    """Begin, continue and end a session on behalf of a trainer.

    `given` is a session, or None; `options` are those of `sonde.init`.
    """

    def __init__(self, given: AnySession | None, options: Mapping[str, Any]) -> None:
        self._given, self._options = given, dict(options)
        self.session: AnySession | None = None
        self._is_own = self._has_failed = False

    def begin(self, config: Mapping[str, Any], *, resume: Path | None = None) -> AnySession:
        """The session: the one given, the one of this process, or a new one. Asked again, the same."""
        if self.session is not None and not self.session.is_finished:
            return self.session
        begun = active_session()
        found = self._given if self._given is not None else begun if isinstance(begun, Session) else None
        if found is not None and not found.is_finished:
            self.session, self._is_own = found, False
            return found
        options = {**self._options, "config": {**config, **(self._options.get("config") or {})}}
        if resume is not None:
            options["resume"] = str(resume)
        self.session, self._is_own, self._has_failed = init(**options), True, False
        return self.session

    def return_to(self, step: int, run: Path | None = None) -> None:
        """The trainer has loaded a checkpoint; this step of that run comes after it. A checkpoint from elsewhere says
        where the steps of a new run begin; a session that has made steps of its own keeps counting them."""
        session = self.session
        if session is None:
            return
        is_its_run = run is not None and session.path in (None, absolute(run))  # other ranks do not know theirs
        if session.is_fresh or is_its_run:
            session.rewind(step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Numbers at this step. A run of ours that has finished takes them as well: many evaluate after training."""
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
            ended.recording.warn_once(
                "log afterwards", f"what was logged after the training is not in its run: {error}"
            )

    def end(self, error: BaseException | None = None) -> None:
        """Finish a session of our own; the user's goes on."""
        if self.session is None or not self._is_own:
            return
        self._has_failed = self._has_failed or error is not None
        if isinstance(self.session, Session):
            self.session.finish(*status_of(error))
        else:
            self.session.finish()


class TrainerMixin:
    """What every callback in a trainer begins with: a session or the options of one, and the keywords of `watch`."""

    def __init__(
        self, session: AnySession | None = None, *, watch: Mapping[str, Any] | None = None, **init: Any
    ) -> None:
        super().__init__()
        self.watch = dict(watch or {})
        self._joining = TrainerSession(session, init)

    @property
    def session(self) -> AnySession | None:
        """What is recorded to, once training has begun."""
        return self._joining.session
