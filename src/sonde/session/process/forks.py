"""In a forked child, runs belong to the parent: the child's sessions forget them."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

import sonde.probe.locks  # noqa: F401 - its locks must be free before sessions are notified


class Forked(Protocol):
    def _forked(self) -> None:
        """Called in a child that this process forked."""


alive: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()
"""Sessions that are not finished."""


def _forget_in_child() -> None:
    for session in list(alive):
        session._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
