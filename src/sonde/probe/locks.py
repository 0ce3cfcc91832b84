"""Locks that a fork does not leave locked: the thread that holds one does not exist in the child."""

from __future__ import annotations

import os
import threading
from typing import Final

_all: Final[list[ForkLock]] = []


class ForkLock:
    """A lock that is free in a forked child:  `with lock.held:`. Created once, for a module.

    Not a context manager itself: an interrupt at the first line of a release written in Python would leave it locked.
    """

    def __init__(self) -> None:
        self.held = threading.Lock()
        _all.append(self)

    def renew(self) -> None:
        self.held = threading.Lock()


def _renew_all() -> None:
    for lock in _all:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
