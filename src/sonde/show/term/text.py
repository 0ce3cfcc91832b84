"""Text from a run, made safe for a terminal: a name can neither move the cursor nor hide its end."""

from __future__ import annotations

import unicodedata
from typing import Final

# Control characters, directions that reorder a line, invisible marks, and halves of characters.
_UNSAFE: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def plain(value: object, limit: int | None = None) -> str:
    r"""The value as one line of visible characters; what is not visible is spelled out.

    >>> plain("\x1b[31mred\n")
    '\\x1b[31mred\\n'
    """
    text = str(value)
    if not text.isprintable():
        text = "".join(map(_visible, text))
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


def _visible(character: str) -> str:
    if unicodedata.category(character) not in _UNSAFE:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")
