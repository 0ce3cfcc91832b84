"""CPU time of sonde's own threads in this process. Each thread reads its own clock; any thread reads the sum."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Final

_numbers: Final = itertools.count()
_seconds: Final[dict[int, float]] = {}
"""By thread, in the order of their first `note_thread_time`. A thread that has ended keeps its last value."""


class _Own(threading.local):
    """The number of the current thread. Its ident would not do: the system gives it to the next thread."""

    def __init__(self) -> None:
        self.number = next(_numbers)


_own: Final = _Own()


def note_thread_time() -> None:
    """Called by a thread of ours whenever it has done some work."""
    _seconds[_own.number] = time.thread_time()


def threads_cpu_s() -> float:
    """CPU seconds that our threads have used so far."""
    return sum(list(_seconds.values()))
