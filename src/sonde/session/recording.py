"""Shared by every part of a session: the writer, the settings, the step, warnings and failure reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from sonde.budget.ledger import Ledger
from sonde.config import Settings
from sonde.display import print_line
from sonde.schema.records import Event, Severity
from sonde.session.observers.mirror import Observers
from sonde.write.writer import Writer, WriterOptions

_MAX_WARNINGS: Final = 100
"""Maximum number of different warnings in one session. A program may create new names at every step."""


class Breaker:
    """Counts internal failures: each is reported once, and after too many sonde switches itself off.

    Keeps no exception, since a traceback would keep the user's tensors alive.
    """

    def __init__(self, max_errors: int, warn: Callable[[str], None], on_open: Callable[[str], None]) -> None:
        self.max_errors, self.warn, self.on_open = max_errors, warn, on_open
        self.num_errors = 0
        self.is_open = False
        self._told: set[str] = set()

    def __call__(self, where: str, error: Exception) -> None:
        """Record a failure in a hook. Training continues."""
        self.num_errors += 1
        what = f"{where}: {type(error).__name__}: {error}"[:500]
        key = f"{where}: {type(error).__name__}"
        if key not in self._told:
            self._told.add(key)
            self.warn(f"a measurement failed and was skipped ({what}). Training is not affected.")
        if self.num_errors >= self.max_errors and not self.is_open:
            self.is_open = True
            self.on_open(what)


class StepCount(Protocol):
    """The position of a training thread."""

    number: int
    """The current step, or the last one that was made."""
    is_over: bool
    """Whether its optimizers have stepped and the next step has not started."""


class Recording:
    """One run that is being written. It knows nothing about models, so any part of a session may hold it."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        observers: Observers,
        *,
        resume: bool = False,
        is_same_attempt: bool = False,
        rank: int = 0,
        first_step: int | None = None,
    ) -> None:
        self.rank = rank
        self.path, self.settings, self.observers = path, settings, observers
        self.is_finished = False
        self.ledger = Ledger(settings.budget, settings.budget_seconds)
        self.count: Callable[[], StepCount] | None = None
        """The step count of the calling thread, once there is one."""
        self.at_beat: list[Callable[[], None]] = []
        """Called on the writer thread, about once per second."""
        self.at_finish: list[Callable[[], Any]] = []
        """Called when the session ends, however it ends."""
        self.is_logged_ahead = False
        """Whether something was logged at a future step."""
        self.breaker = Breaker(settings.max_errors, self._measurement_failed, self._switched_off)
        self._warned: set[str] = set()
        options = settings.writer.model_dump() | ({} if settings.system_metrics else {"system_interval_s": 0.0})
        self.writer = Writer(
            path,
            WriterOptions(**options, rank=rank, first_step=first_step),
            resume=resume,
            is_same_attempt=is_same_attempt,
            on_warning=self.warn,
            observer=observers,
            on_beat=self._beat,
        )
        self.first_step = self.writer.next_step

    # ------------------------------------------------------------------------------------------------------------- step

    @property
    def step_number(self) -> int:
        """The current step, or the last one that was made."""
        return self.first_step if self.count is None else self.count().number

    @property
    def is_step_over(self) -> bool:
        """Whether the optimizers have stepped and the next forward pass has not started."""
        return self.count is not None and self.count().is_over

    @property
    def next_step(self) -> int:
        return self.step_number + self.is_step_over

    # --------------------------------------------------------------------------------------------------------- messages

    def event(
        self, type: str, message: str, *, severity: Severity = "info", details: dict[str, Any] | None = None
    ) -> None:
        self.writer.event(self._event(type, message, severity, details))

    def warn(self, message: str) -> None:
        """Print a warning. Not with the warnings module: a user's filter may turn warnings into exceptions. In a job of
        several ranks the first prints; what another warns of is in the run."""
        if not self.rank:
            print_line(f"sonde: warning: {message}")

    def warn_once(self, key: str, message: str) -> None:
        event = self.warned(key, message)
        if event is not None:
            self.writer.event(event)

    def warned(self, key: str, message: str) -> Event | None:
        """Warn once per key and return the event for the caller to record; None if this warning was given before."""
        if key in self._warned or len(self._warned) > _MAX_WARNINGS:
            return None
        self._warned.add(key)
        if len(self._warned) > _MAX_WARNINGS:
            message = f"more than {_MAX_WARNINGS} different warnings; further ones are not shown."
        self.warn(message)
        return self._event("warning", message, severity="warning")

    def say(self, message: str) -> None:
        """Print one line, unless `verbose` is off."""
        if self.settings.verbose:
            print_line(f"sonde: {message}")

    def _event(self, type: str, message: str, severity: Severity, details: dict[str, Any] | None = None) -> Event:
        at, now = self.step_number, time.time()
        return Event(type=type, message=message, step=at, time=now, severity=severity, details=details or {})

    # -------------------------------------------------------------------------------------------------------- internals

    def _beat(self) -> None:
        self.ledger.thread_clock.mark()
        for call in self.at_beat:
            call()

    def _measurement_failed(self, message: str) -> None:
        self.warn(message)
        self.event("measurement_failed", message, severity="warning")

    def _switched_off(self, what: str) -> None:
        self.warn(
            f"recording switched off after {self.breaker.num_errors} internal errors, the last in {what}. Training "
            "continues."
        )
        self.event("switched_off", f"sonde switched itself off: {what}", severity="critical")
        self.writer.note(switched_off=what)
