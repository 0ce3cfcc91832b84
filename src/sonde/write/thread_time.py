"""CPU time and priority of sonde's own threads in this process.

Each thread reads its own clock; any thread reads the sum. Work that may be late has a priority below that of training.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from typing import Final

NICENESS: Final = 10
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


def lower_priority() -> None:
    """Give training precedence over this thread: on Linux each thread has its own priority.

    Only for a thread that seldom needs the interpreter. On a busy machine, one that waits for a core while it holds the
    interpreter makes training wait as well.
    """
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        except OSError:
            return
