"""The session that a trainer's callback records to: the one the user has begun, or one of its own that ends with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sonde.session.current import active_session, init
from sonde.session.ending import status_of
from sonde.session.null import NullSession
from sonde.session.session import Session

AnySession = Session | NullSession


class Joining:
    """Begin, continue and end a session on behalf of a trainer.

    `given` is a session, or None; `options` are those of `sonde.init`.
    """

    def __init__(self, given: AnySession | None, options: Mapping[str, Any]) -> None:
        self._given, self._options = given, dict(options)
        self.session: AnySession | None = None
        self._is_own = False

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
        self.session, self._is_own = init(**options), True
        return self.session

    def continue_at(self, step: int, scalars: Iterable[tuple[str, int]] = ()) -> None:
        """The trainer begins at this step: it has loaded a checkpoint."""
        if isinstance(self.session, Session):
            self.session.continue_at(step, scalars)

    def end(self, error: BaseException | None = None) -> None:
        """Finish a session of our own; the user's goes on."""
        if self.session is None or not self._is_own:
            return
        if isinstance(self.session, Session):
            self.session.finish(*status_of(error))
        else:
            self.session.finish()


class Hosted:
    """What every callback in a trainer begins with: a session or the options of one, and the keywords of `watch`."""

    def __init__(
        self, session: AnySession | None = None, *, watch: Mapping[str, Any] | None = None, **init: Any
    ) -> None:
        super().__init__()
        self.watch = dict(watch or {})
        self._joining = Joining(session, init)

    @property
    def session(self) -> AnySession | None:
        """What is recorded to, once training has begun."""
        return self._joining.session
