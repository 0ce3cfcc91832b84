"""Attempts: a run that returns to an earlier step starts a new one; the steps recorded after that step are abandoned.

An attempt covers every step from its first one on, and for each step the last attempt that covers it is shown. Nothing
is deleted: an earlier attempt is shown by leaving out the later ones. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from sonde.schema.layout import Stream

NO_LIMIT: Final = (1 << 63) - 1
"""Used instead of a step: there is no such step."""

Reason = Literal["start", "resume", "rewind"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far an attempt has come. Every frame of scalars carries one, and is written after the sketches it covers."""

    complete: int = NO_LIMIT
    """Steps before it are complete: a process that resumes the run starts here. NO_LIMIT: no steps were counted."""
    visible: int = NO_LIMIT
    """Steps before it are shown if the process is killed; later ones may lack sketches or scalars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, as the catalog knows it."""

    number: int
    rank: int = 0
    first_step: int = 0
    time: float = 0.0
    """When it started."""
    reason: Reason = "start"
    stats_sequence: int = 0
    """The first frame of sketches that belongs to it."""
    scalars_sequence: int = 0
    mark: Mark = Mark()
    """As of the last sealed frame, or of its end; later frames of the log are newer."""

    def first_sequence(self, stream: Stream) -> int:
        return self.stats_sequence if stream == "stats" else self.scalars_sequence


@dataclass(frozen=True, slots=True)
class History:
    """Attempts in order, from the first to the one that is shown. A run without any has one that started with it.

    >>> history = History([Attempt(number=0), Attempt(number=1, first_step=10, stats_sequence=20)])
    >>> history.attempt_of("stats", 19), history.limit(0), history.attempt_of("stats", 20)
    (0, 10, 1)
    """

    attempts: Sequence[Attempt] = ()

    @property
    def last(self) -> int:
        """The number of the attempt that is shown."""
        return max(len(self.attempts) - 1, 0)

    def attempt_of(self, stream: Stream, sequence: int) -> int:
        """The attempt that a frame belongs to: the last one started before it."""
        for attempt in reversed(self.attempts):
            if attempt.first_sequence(stream) <= sequence:
                return attempt.number
        return 0

    def limit(self, number: int) -> int:
        """The first step at which rows of this attempt are not shown; before it all of them are."""
        return min(self.attempts[number].mark.visible, self.abandoned_from(number)) if self.attempts else NO_LIMIT

    def abandoned_from(self, number: int) -> int:
        """The first step of this attempt that a later one covers."""
        return min((attempt.first_step for attempt in self.attempts[number + 1 :]), default=NO_LIMIT)

    def until(self, number: int) -> History:
        """The history as it was before the next attempt started."""
        return History(tuple(self.attempts[: number + 1]))
