"""The attempts of a run, as its writer knows them.

The catalog row of an attempt is committed before the first frame that belongs to it. An attempt that records nothing
leaves no row. Used in the writer thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from sonde.schema.attempts import Attempt, History, Mark, Reason
from sonde.schema.layout import Stream
from sonde.schema.records import Event

_TYPES: dict[Reason, str] = {"resume": "resumed", "rewind": "rewound"}


class Attempts:
    """`stored` are the attempts in the catalog; `next_sequence` returns the number of the next frame of a stream."""

    def __init__(self, stored: Sequence[Attempt], next_sequence: Callable[[Stream], int], *, rank: int) -> None:
        self.all = list(stored)
        self.num_stored = len(self.all)
        self._next_sequence, self._rank = next_sequence, rank
        self._ends: dict[int, int] = {}
        """By attempt: the step of training when it started."""

    @property
    def current(self) -> Attempt:
        return self.all[-1]

    @property
    def history(self) -> History:
        return History(self.all)

    @property
    def is_stored(self) -> bool:
        return self.num_stored == len(self.all)

    @property
    def is_new(self) -> bool:
        """Whether this process started the current attempt, after another one."""
        return self.current.number in self._ends

    @property
    def has_frames(self) -> bool:
        """Whether the current attempt has recorded anything."""
        streams: tuple[Stream, ...] = ("stats", "scalars")
        return any(self._next_sequence(stream) > self.current.first_sequence(stream) for stream in streams)

    def at(self, moment: float) -> int:
        """The attempt that was current at this time."""
        return next((attempt.number for attempt in reversed(self.all) if attempt.time <= moment), 0)

    def begin_first(self, moment: float) -> None:
        """Add the first attempt of a new run, or of a run of format 1, which has rows but no attempt."""
        self.all.append(Attempt(number=0, rank=self._rank, time=moment))

    def begin(self, first_step: int, reason: Reason, *, after: int, moment: float | None = None) -> None:
        """Start a new attempt: frames from now on belong to it. `after` is the step of training, `moment` the time of
        its return: the writer may learn of it later."""
        self._ends[len(self.all)] = after
        self.all.append(
            Attempt(
                number=len(self.all),
                rank=self._rank,
                first_step=first_step,
                time=time.time() if moment is None else moment,
                reason=reason,
                stats_sequence=self._next_sequence("stats"),
                scalars_sequence=self._next_sequence("scalars"),
            )
        )

    def move(self, first_step: int) -> None:
        """Move the current attempt, which has recorded nothing, to this step."""
        assert not self.has_frames
        self.all[-1] = replace(self.current, first_step=first_step)

    def set_mark(self, number: int, mark: Mark) -> Attempt:
        """Remember how far an attempt has come; returns the attempt, for the catalog."""
        self.all[number] = replace(self.all[number], mark=mark)
        return self.all[number]

    def unstored(self) -> list[Attempt]:
        """Attempts without a catalog row, and the one before them, whose final mark is known by now."""
        return [] if self.is_stored else self.all[max(self.num_stored - 1, 0) :]

    def have_stored(self) -> None:
        self.num_stored = len(self.all)

    def event(self, was: str) -> Event | None:
        """The event for the start of the current attempt; `was` is the previous status of the run."""
        attempt = self.current
        if not self.is_new:
            return None
        first, last = attempt.first_step, self._ends[attempt.number] - 1
        is_abandoning = last >= first
        resumed = f"resumed at step {first}; the run was {was}"
        message = resumed if attempt.reason == "resume" else f"returned to step {first}"
        if is_abandoning:
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            message += f": {steps} of attempt {attempt.number - 1} are abandoned and recorded again"
        return Event(
            type=_TYPES[attempt.reason],
            message=message,
            step=first,
            time=attempt.time,
            severity="warning" if is_abandoning else "info",
            details={
                "attempt": attempt.number,
                "first_step": first,
                "abandoned": [first, last] if is_abandoning else [],
            },
        )
