"""Names in foreign modules and classes that are temporarily replaced. A later replacement by others is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replaced:
    """Replacements, to be undone. A name that does not exist, as in another version, is ignored."""

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
        """An inherited name is inherited again: ours is only removed."""
        for holder, name, ours, original, is_inherited in self._all:
            if getattr(holder, name, None) is not ours:
                continue
            if is_inherited:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        self._all.clear()
