"""The cost of recording in words, from `facts.overhead` of run.json. Every place that reports it uses this sentence."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any


def recording_took(overhead: Any) -> str:
    """One sentence without its full stop; empty if the cost is not known, as in runs of earlier versions.

    >>> recording_took({"seconds": 4.06, "elapsed_s": 312.4})
    'Recording took 4.1 s of 312 s (1.3 %)'
    """
    if not isinstance(overhead, Mapping):
        return ""
    spent_s, elapsed_s = _time(overhead.get("seconds")), _time(overhead.get("elapsed_s"))
    if not spent_s or not elapsed_s:
        return ""
    percent = min(100 * spent_s / elapsed_s, 100.0)
    return f"Recording took {_seconds(spent_s)} of {_seconds(elapsed_s)} ({percent:.{0 if percent >= 10 else 1}f} %)"


def _time(value: Any) -> float:
    """A number of seconds; 0 for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return float(value) if is_number and value > 0 else 0.0


def _seconds(seconds: float) -> str:
    """A duration with a readable unit.

    >>> _seconds(0.0473), _seconds(0.263), _seconds(1.23), _seconds(3120.7)
    ('47 ms', '0.26 s', '1.2 s', '3,121 s')
    """
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
