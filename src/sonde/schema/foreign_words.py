"""What a foreign library's error says, without where in its source it was. No I/O."""

from __future__ import annotations

import re
from typing import Final

from sonde.errors import SondeError

_MARKS: Final = " |`->x\t"
_WHERE: Final = re.compile(r"context:|\d+: \w+::.*|with \w+=.*|at \S+\.rs:\d+")
"""Lines of a Rust error that name places in its source, and nothing that a reader could do something about."""


def in_words(error: BaseException, most: int = 300) -> str:
    """One line from the outermost cause to the innermost, which is the one that tells. Our own are said as they are.

    >>> in_words(ValueError("  x cannot open\\n  | context:\\n  |  0: ice::open\\n  |-> io error\\n  `-> refused"))
    'ValueError: cannot open: io error: refused'
    """
    if isinstance(error, SondeError):
        return str(error)
    causes: list[str] = []
    for line in str(error).splitlines():
        words = line.strip(_MARKS)
        if words and not _WHERE.fullmatch(words) and not any(words in earlier for earlier in causes):
            causes.append(words)
    text = f"{type(error).__name__}: {': '.join(causes)}"
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
