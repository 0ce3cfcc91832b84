"""Locks that a fork does not leave locked: the thread that holds one does not exist in the child."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Final

_all: Final[list[ForkLock]] = []


class ForkLock:
    """A lock that is free in a forked child. Made once, for a module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.append(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock = threading.Lock()


def _renew_all() -> None:
    for lock in _all:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
