"""Errors, sizes and dtypes in words, the same everywhere. No I/O."""

from __future__ import annotations

import re
from typing import Final

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
