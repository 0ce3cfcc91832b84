"""Strings that SQLite and JSON can store: lone surrogates and NUL are escaped, and different names stay different."""

from __future__ import annotations

import re
from typing import Final

from sonde.schema.names import percent_encoded, site_name

_UNSTORABLE: Final = re.compile(r"[\x00\ud800-\udfff]")
# The form of an escaped name; a name that merely looks like one is also escaped, or two names would become one.
_LOOKS_ESCAPED: Final = re.compile(r"%(?:00|25|ED)")


def storable_site(name: str) -> str:
    """A safe name: the name itself, or an escaped one."""
    return site_name(name) if _UNSTORABLE.search(name) else name


def storable_name(name: str) -> str:
    """The safe name of a scalar, including slashes.

    >>> storable_name("train/loss")
    'train/loss'
    """
    if not _UNSTORABLE.search(name) and not _LOOKS_ESCAPED.search(name):
        return name
    return _UNSTORABLE.sub(percent_encoded, name.replace("%", "%25"))


def storable_text(text: str) -> str:
    """Prose: a message, a note."""
    return _UNSTORABLE.sub(percent_encoded, text)
