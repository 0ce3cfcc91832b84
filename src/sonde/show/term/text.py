"""Text from a run, made safe for a terminal: a name can neither move the cursor nor hide part of itself."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Control characters, direction marks that reorder a line, invisible characters, and surrogates.
_UNSAFE: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def plain(value: object, limit: int | None = None) -> str:
    r"""The value as one line of visible characters; invisible ones are escaped.

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


def prose(text: str) -> Iterator[tuple[str, bool]]:
    """Split text at its backticks: each part, and whether it is code. An unpaired backtick is kept as text.

    >>> list(prose("Use `clamp_min`."))
    [('Use ', False), ('clamp_min', True), ('.', False)]
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    return ((part, bool(index % 2)) for index, part in enumerate(parts) if part)


def place(folder: Path) -> str:
    """A folder as people write it.

    >>> place(Path("runs")), place(Path("/data/runs"))
    ('./runs', '/data/runs')
    """
    return str(folder) if folder.is_absolute() or str(folder).startswith(".") else f"./{folder}"
