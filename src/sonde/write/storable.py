"""Texts that SQLite and JSON can hold: lone surrogates and NUL are escaped, and different names stay different."""

from __future__ import annotations

import re
from typing import Final

from sonde.schema.names import percent_encoded, site_name

_UNSTORABLE: Final = re.compile(r"[\x00\ud800-\udfff]")
# What an escaped name looks like; a name that merely looks so is escaped as well, or two names would become one.
_LOOKS_ESCAPED: Final = re.compile(r"%(?:00|25|ED)")


def storable_site(name: str) -> str:
    """The name itself; one that was never made safe is made safe."""
    return site_name(name) if _UNSTORABLE.search(name) else name


def storable_name(name: str) -> str:
    """A scalar's name, slashes and all.

    >>> storable_name("train/loss")
    'train/loss'
    """
    if not _UNSTORABLE.search(name) and not _LOOKS_ESCAPED.search(name):
        return name
    return _UNSTORABLE.sub(percent_encoded, name.replace("%", "%25"))


def storable_text(text: str) -> str:
    """Prose: a message, a note."""
    return _UNSTORABLE.sub(percent_encoded, text)
