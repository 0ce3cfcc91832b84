"""The cost of recording inside a compiled step: no clock can run inside it, so steps that record are compared with
neighbouring steps that do not.

A device may be many steps behind the host. So a step's result is polled, and never waited for.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any, Final

from sonde.budget.meter import Meter, StepTimes

KIND: Final = "optimizer"
"""Everything recorded is recorded together, and thinned like optimizer data."""
_MIN_KNOWN: Final = 5
_NUM_KNOWN: Final = 50
_NUM_EXTRA: Final = 9
_PAUSE: Final = 8
"""Ratio to similar steps above which a step was recompiled, or something else happened in between."""
_MAX_OPEN: Final = 256
"""Steps that may wait for their result, or for silent ones to compare with; older ones are dropped."""


class CompiledMeter(Meter):
    """Call `begin` when a step starts; `note` says, before it ends, whether it is recorded and what its result will be.

    >>> meter, now = CompiledMeter(), 0.0
    >>> for step in range(13):
    ...     meter.begin(now)
    ...     meter.note(is_recorded=step % 2 == 0)
    ...     meter.end_step(step, 0.0)
    ...     now += 0.003 if step % 2 == 0 else 0.002
    >>> [round(times.host_s["optimizer"], 6) for times in meter.done() if times.host_s]
    [0.001, 0.001, 0.001, 0.001, 0.001, 0.001]
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: tuple[Any, Any] | None = None
        self._ended: tuple[StepTimes, Any, Any] | None = None
        self._running: deque[tuple[StepTimes, Any, Any]] = deque()
        self._timed: deque[tuple[StepTimes, bool]] = deque()
        self._known: dict[bool, deque[float]] = {is_recorded: deque(maxlen=_NUM_KNOWN) for is_recorded in (True, False)}
        self._extra: deque[float] = deque(maxlen=_NUM_EXTRA)
        self._began_s = self._last_s = 0.0

    def begin(self, now: float) -> None:
        """Start a step, which lasts until the next one starts: the program waits for its numbers in between."""
        if self._ended is not None:
            times = self._ended[0]
            times.wall_s = now - self._began_s
            self._running.append(self._ended)
            self._look(times.step, now)
            self._ended = None
        self._began_s = now

    def note(self, *, is_recorded: Any, result: Any = None) -> None:
        """`result` is polled with `is_ready()`; a result without it is ready at once. When it is ready, so is
        `is_recorded`, which may be on a device too."""
        self._noted = is_recorded, result

    def end_step(self, step: int, wall_s: float) -> None:
        times, self._now = self._now, StepTimes(step + 1)
        times.step = step
        noted, self._noted = self._noted, None
        self._ended = None if noted is None else (times, *noted)

    def done(self) -> list[StepTimes]:
        """Steps whose times are known, as soon as there are enough silent ones; each is returned once."""
        silent = self._known[False]
        if len(silent) < _MIN_KNOWN:
            while len(self._timed) > _MAX_OPEN:
                self._timed.popleft()
            return []
        usual_s = statistics.median(silent)
        found = []
        while self._timed:
            times, is_recorded = self._timed.popleft()
            if times.step_s > _PAUSE * statistics.median(self._known[is_recorded]):
                continue
            times.host_s = {KIND: self._typical(times.step_s - usual_s)} if is_recorded else {}
            found.append(times)
        return found

    def _typical(self, extra_s: float) -> float:
        """A single difference means little: steps differ for many reasons."""
        self._extra.append(extra_s)
        return max(statistics.median(self._extra), 0.0)

    def _look(self, step: int, now: float) -> None:
        """Collect the results that are ready."""
        while self._running and _is_ready(self._running[0][2]):
            times, known, _ = self._running.popleft()
            is_recorded = bool(known)
            # A device that keeps up waits for the host, whose clock is exact; one that lags has its own pace.
            times.step_s = now - self._last_s if step - times.step > 1 else times.wall_s
            self._last_s = now
            self._timed.append((times, is_recorded))
            self._known[is_recorded].append(times.step_s)
        if len(self._running) > _MAX_OPEN:
            self._running.clear()


def _is_ready(result: Any) -> bool:
    ask = getattr(result, "is_ready", None)
    return ask is None or bool(ask())
