"""How a run ended: from the exit code of its process, or from the silence of one that is gone."""

from __future__ import annotations

import signal
from typing import Final

from sonde.schema.layout import RunStatus

UNKNOWN_CODE: Final = 120
"""Python could not flush its output, as into a pipe that was closed: it says nothing about the program."""
ENDED_AT_EXIT: Final = "ended_at_exit"
"""A fact in run.json: the run ended with its process, whose exit code says how."""
_STOPPED: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})


def ending_of(code: int) -> tuple[RunStatus, str]:
    """Status and reason.

    >>> ending_of(0), ending_of(3), ending_of(143)
    (('finished', ''), ('crashed', 'exit code 3'), ('interrupted', 'SIGTERM (exit code 143)'))
    """
    if code == 0:
        return "finished", ""
    try:
        number = signal.Signals(code - 128)
    except ValueError:
        return "crashed", f"exit code {code}"
    return "interrupted" if number in _STOPPED else "crashed", f"{number.name} (exit code {code})"


def lost(last_step: int) -> str:
    """The reason shown for a run whose process disappeared."""
    after = f"after step {last_step:,}" if last_step >= 0 else "before its first step"
    return f"ended without a goodbye (killed, out of memory or power loss) {after}"
