"""Errors, sizes, dtypes and the cost of recording in words, the same everywhere. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from sonde.errors import SondeError

MIB: Final = 1 << 20
_MARKS: Final = " |`->x\t"
_WHERE: Final = re.compile(r"context:|\d+: \w+::.*|with \w+=.*|at \S+\.rs:\d+")
"""Lines of a Rust error that name places in its source, which do not help the reader."""


def in_words(error: BaseException, most: int = 300) -> str:
    """One line for someone who did not write the code: our own errors unchanged, the system's without their number.

    For an error of a foreign library, its causes from the outermost to the innermost, without places in its source.

    >>> in_words(ValueError("  x cannot open\\n  | context:\\n  |  0: ice::open\\n  |-> io error\\n  `-> refused"))
    'ValueError: cannot open: io error: refused'
    """
    if isinstance(error, SondeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    causes: list[str] = []
    for line in str(error).splitlines():
        words = line.strip(_MARKS)
        if words and not _WHERE.fullmatch(words) and not any(words in earlier for earlier in causes):
            causes.append(words)
    text = f"{type(error).__name__}: {': '.join(causes)}"
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def dtype_name(dtype: object) -> str:
    """A torch or numpy dtype by its bare name.

    >>> dtype_name(torch.bfloat16), dtype_name(np.dtype("float32"))
    ('bfloat16', 'float32')
    """
    return str(dtype).removeprefix("torch.")


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
