"""The priority of work that may be late: below that of training."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

NICENESS: Final = 10


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
