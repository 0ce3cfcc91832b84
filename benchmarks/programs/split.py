"""The rule that holds programs out: whole architectures and tasks, by a hash of their names, fixed before any run."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

ONE_IN: Final = 4


def is_name_held_out(name: str) -> bool:
    """Whether an architecture or a task is held out. Nothing but the name decides.

    >>> is_name_held_out("mlp") == is_name_held_out("mlp")
    True
    """
    return sha256(f"held out: {name}".encode()).digest()[0] % ONE_IN == 0


def is_held_out(architecture: str, task: str) -> bool:
    return is_name_held_out(architecture) or is_name_held_out(task)


def choose(key: str, num: int) -> int:
    """A number below `num`, always the same for the same key."""
    return int.from_bytes(sha256(key.encode()).digest()[:8], "big") % num
