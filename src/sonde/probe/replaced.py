"""Names in other people's modules and classes that are ours for a while. What somebody has put there since stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replaced:
    """What was replaced, to be put back. A name that is not there, as in another version, is left alone."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, str, Any, Any, bool]] = []

    def put(self, holder: Any, name: str, watch: Callable[[Any], Callable[..., Any]]) -> None:
        """Have `watch(original)` called instead of the original."""
        original = getattr(holder, name, None)
        if original is not None:
            ours = functools.wraps(original)(watch(original))
            is_inherited = name not in getattr(holder, "__dict__", (name,))
            setattr(holder, name, ours)
            self._all.append((holder, name, ours, original, is_inherited))

    def restore(self) -> None:
        """What was inherited is so again: then ours is only taken away."""
        for holder, name, ours, original, is_inherited in self._all:
            if getattr(holder, name, None) is not ours:
                continue
            if is_inherited:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        self._all.clear()
