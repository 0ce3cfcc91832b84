"""CPU time of one of our own threads: what it takes from the interpreter, training has to wait for."""

from __future__ import annotations

import contextlib
import threading
import time


class ThreadClock:
    """CPU time of the thread that calls `mark`, readable in every thread."""

    __slots__ = ("_id", "_start_s", "_stopped", "_total_s")

    def __init__(self) -> None:
        self._id: int | None = None
        self._start_s: float | None = None
        self._total_s = 0.0
        self._stopped = False

    def mark(self) -> None:
        """Called in that thread. Elsewhere than on Linux its time is known as of the last call."""
        now_s = time.thread_time()
        if self._start_s is None:
            self._start_s = now_s
            if hasattr(time, "pthread_getcpuclockid"):
                self._id = time.pthread_getcpuclockid(threading.get_ident())
        if not self._stopped:
            self._total_s = now_s - self._start_s

    def read(self) -> float:
        """Seconds since the first `mark`."""
        if self._id is not None and self._start_s is not None and not self._stopped:
            with contextlib.suppress(OSError):  # the thread has ended
                self._total_s = time.clock_gettime(self._id) - self._start_s
        return self._total_s

    def reset(self) -> None:
        """Count from now on: someone has waited for the thread."""
        if self._start_s is not None:
            self._start_s += self.read()
            self._total_s = 0.0

    def stop(self) -> None:
        """Someone waits for the thread from now on, so its time counts as theirs."""
        self.read()
        self._stopped = True
