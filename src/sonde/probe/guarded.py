"""Runs a part of our work that may fail without affecting the rest. Needs no torch: a session may have none."""

from __future__ import annotations

from collections.abc import Callable


class attempt:  # noqa: N801 - reads as a statement: `with attempt(on_error, "clip"):`
    """Reports a failure and continues after the block. Exceptions that end the program on purpose pass through."""

    __slots__ = ("_name", "_on_error")

    def __init__(self, on_error: Callable[[str, Exception], None], name: str) -> None:
        self._on_error, self._name = on_error, name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._on_error(self._name, error)
        return True
