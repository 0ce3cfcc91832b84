"""Where a process is in its training, and how it returns to an earlier step: that begins a new attempt."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonde.session.session import Session


class Position:
    """Which steps a process may return to: any step before it has made one, because it may have loaded any
    checkpoint; afterwards none that lies ahead."""

    def __init__(self) -> None:
        self._is_fresh = True
        self._has_returned = False
        self._furthest = math.inf

    @property
    def is_new(self) -> bool:
        """Whether no step was made, and nobody has said which one comes first."""
        return self._is_fresh and not self._has_returned

    @property
    def is_fresh(self) -> bool:
        """Whether no step was made since the process began, or since it returned to an earlier step."""
        return self._is_fresh

    def step_made(self) -> None:
        self._is_fresh = False

    def may_return_to(self, step: int, next_step: int) -> bool:
        return 0 <= step <= (self._furthest if self._is_fresh else next_step)

    def returned(self, next_step: int) -> None:
        """`next_step` is the one that would have come."""
        self._furthest = max(self._furthest, next_step) if self._is_fresh else next_step
        self._is_fresh = self._has_returned = True


def rewind(session: Session, step: Any) -> bool:
    """Begin a new attempt at this step. A step that cannot be is ignored, with a warning; never raises."""
    if session.is_finished:
        session.warn_once("rewind after finish", "rewind() after finish() does nothing.")
        return False
    try:
        at = _checked(session, step)
        if at is not None:
            _return_to(session, at)
    except Exception as error:  # noqa: BLE001 - our failure must not end their training
        session.breaker("rewind", error)
        return False
    return at is not None


def _checked(session: Session, step: Any) -> int | None:
    try:
        at = operator.index(step)
    except TypeError:
        at = -1
    if session.threads.are_several:
        session.warn_once(
            "rewind of several threads",
            f"rewind({step!r}) is ignored: several threads have trained in this run, and each counts its own steps.",
        )
        return None
    if session.position.may_return_to(at, session.next_step):
        return at
    session.warn_once(
        "rewind",
        f"rewind({step!r}) is ignored: it takes a step from 0 to the next one, which is {session.next_step}.",
    )
    return None


def _return_to(session: Session, step: int) -> None:
    next_step = session.next_step
    session.threads.finish()  # a step in progress is given up; what was measured of it stays in the attempt that ends
    session.snapshots.rewound()
    session.writer.begin_attempt(step, after=next_step)
    session.position.returned(next_step)
    session.threads.restart(step)
    if session.watched_models:
        session.writer.set_step(step, is_first=True)
