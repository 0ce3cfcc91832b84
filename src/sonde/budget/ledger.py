"""The account of a session: the time that recording may add to the run, and the time it has added so far.

The allowance is some seconds at once and a fraction of the time that passes. Everything counts: attaching, compiling,
work on the training thread and on the GPU, the CPU time of our own threads, and `finish`. Pure arithmetic on a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from sonde.budget.thread_clock import ThreadClock

_RESERVE: Final = 0.2
"""The part of the seconds that recording does not use up by itself: for `finish`, and for what takes longer than
expected."""
_LEAST_RESERVE_S: Final = 0.1
_LEAST_PURSE_S: Final = 1.0
"""Time that passes without recording is saved up to this, or to the seconds if they are more."""


imports_s: Final[list[float]] = []
"""Times that importing sonde took, until a session accounts for them."""


class Account(Protocol):
    """Time that the steps of one training thread have lost to recording."""

    @property
    def lost_s(self) -> float: ...


@dataclass(slots=True)
class Ledger:
    """One per session. Without a `fraction` there is no limit.

    >>> ledger = Ledger(0.01, 5.0, clock=iter([0.0, 100.0, 112.0]).__next__)
    >>> ledger.spend("attach", 1.0)
    >>> ledger.pass_time(most_s=60.0)
    >>> round(ledger.remaining_s, 6), ledger.elapsed_s
    (4.6, 112.0)
    """

    fraction: float | None
    seconds: float
    clock: Callable[[], float] = time.perf_counter
    began_s: float = field(init=False)
    accounts: list[Account] = field(default_factory=list)
    spent_by: dict[str, float] = field(default_factory=dict)
    """Seconds that belong to no step, by what they were spent on."""
    thread_clock: ThreadClock = field(default_factory=ThreadClock)
    thread_weight: float = 1.0
    """The part of our threads' time that training waits for: none of it while the GPU has work for longer."""
    _ended_s: float | None = field(default=None, init=False)
    _credit_s: float = field(default=0.0, init=False)
    _passed_s: float = field(init=False)
    _thread_s: float = field(default=0.0, init=False)
    _thread_read_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.began_s = self._passed_s = self.clock()
        self._credit_s = self.seconds

    def spend(self, what: str, seconds: float) -> None:
        self.spent_by[what] = self.spent_by.get(what, 0.0) + seconds

    def begin(self, began_s: float) -> None:
        """Everything since this time was attaching, and so were the imports before."""
        self.began_s = min(self.began_s, began_s) - sum(imports_s)
        imports_s.clear()
        self.spent_by["attach"] = self.clock() - self.began_s
        self.thread_clock.reset()

    def finish(self, began_s: float) -> None:
        """Everything since this time was `finish`, which also waits for our threads; nothing counts afterwards."""
        if self._ended_s is not None:
            return
        self.thread_clock.stop()
        self._ended_s = self.clock()
        self.spent_by["finish"] = self._ended_s - began_s

    def pass_time(self, most_s: float) -> None:
        """Add the allowance for the time since the last call; a pause of training counts as `most_s`."""
        now = self.clock()
        passed_s, self._passed_s = now - self._passed_s, now
        if self.fraction is not None:
            self._credit_s += self.fraction * min(passed_s, most_s)

    @property
    def elapsed_s(self) -> float:
        return (self.clock() if self._ended_s is None else self._ended_s) - self.began_s

    @property
    def spent_s(self) -> float:
        """Everything that recording has added so far."""
        return self.steps_s + sum(self.spent_by.values()) + self.threads_s

    @property
    def steps_s(self) -> float:
        return sum(account.lost_s for account in self.accounts)

    @property
    def threads_s(self) -> float:
        """CPU time of our threads that training had to wait for."""
        now_s = self.thread_clock.read()
        self._thread_s += self.thread_weight * (now_s - self._thread_read_s)
        self._thread_read_s = now_s
        return self._thread_s

    @property
    def remaining_s(self) -> float:
        """Time that may still be spent. Less than was saved up in a long time without recording: a run that has paused
        for hours is not slowed down for minutes."""
        spent_s, purse_s = self.spent_s, max(self.seconds, _LEAST_PURSE_S)
        self._credit_s = min(self._credit_s, spent_s + purse_s)
        return self._credit_s - spent_s

    @property
    def is_ample(self) -> bool:
        """Whether more than half of the seconds is left."""
        return self.seconds > 0 and self.remaining_s > self.seconds / 2

    @property
    def reserve_s(self) -> float:
        return max(_RESERVE * self.seconds, _LEAST_RESERVE_S)
