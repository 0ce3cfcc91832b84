"""Compact formatting of numbers, times and sizes."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """Format with four significant digits; integers without a fraction.

    >>> [number(x) for x in (0.123456, 1e-7, 12345.678, 42.0, float("nan"))]
    ['0.1235', '1e-07', '1.235e+04', '42', 'nan']
    """
    if value is None:
        return "–"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def count(value: int | None) -> str:
    """Format a count with thousands separators."""
    return "–" if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.01234)
    '1.23 %'
    """
    return "–" if share is None else f"{100 * share:.3g} %"


def duration(seconds: float | None) -> str:
    """Format a duration.

    >>> [duration(s) for s in (0.5, 75, 3700, 200_000)]
    ['0.5 s', '1 min 15 s', '1 h 1 min', '2 d 7 h']
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    seconds = max(seconds, 0.0)  # a clock that was set back must not show a negative time
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def age(seconds: float | None) -> str:
    """Format an age in one unit.

    >>> [age(s) for s in (3, 75, 3700, 200_000)]
    ['just now', '1 min ago', '1 h ago', '2 d ago']
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def size(num_bytes: float) -> str:
    """Format a number of bytes in binary units.

    >>> size(3_500_000)
    '3.3 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun, in the singular or plural.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
