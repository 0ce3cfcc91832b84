"""The host memory that snapshots may use: counted and bounded. Allocates nothing. No torch."""

from __future__ import annotations

import threading
from typing import Final, Self

import psutil

_FREE_SHARE: Final = 4


class NoRoomError(Exception):
    """A snapshot needs more memory than the limit leaves. The whole snapshot is skipped."""


def default_limit() -> int:
    """A quarter of the free memory."""
    return int(psutil.virtual_memory().available) // _FREE_SHARE


class HostMemory:
    """Counts the bytes that snapshots hold. Used from the training thread and from the writing thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        # Reentrant: a user's signal handler may request a snapshot in the middle of one.
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._used_bytes = 0

    @classmethod
    def of(cls, limit_mib: float | None) -> Self:
        """The setting `snapshot_mib`."""
        return cls(default_limit() if limit_mib is None else int(limit_mib * (1 << 20)))

    @property
    def used_bytes(self) -> int:
        """The bytes that snapshots hold now, without free blocks."""
        return self._used_bytes

    @property
    def left_bytes(self) -> int:
        return max(self.limit_bytes - self._used_bytes, 0)

    def reserve(self, nbytes: int, *, wait_s: float = 0.0) -> None:
        """Count these bytes, and wait for others to return theirs if there are too many."""
        with self._lock:
            self._wait_for(nbytes, 0, wait_s)
            self._used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        with self._lock:
            self._used_bytes -= nbytes
            self._freed.notify_all()

    def _wait_for(self, nbytes: int, own_bytes: int, wait_s: float) -> None:
        if own_bytes + nbytes > self.limit_bytes:
            need, allowed = own_bytes + nbytes, self.limit_bytes
            raise NoRoomError(
                f"it needs more than {mib(need)}, but snapshot_mib allows {mib(allowed)}. Allow more:  "
                f"sonde.init(snapshot_mib={2 * ((need >> 20) + 1)})  or choose fewer kinds or sites"
            )
        if not self._freed.wait_for(lambda: nbytes <= self.left_bytes, wait_s):
            raise NoRoomError(
                f"it needs {mib(nbytes)} more, but earlier snapshots that are still being written hold "
                f"{mib(self._used_bytes - own_bytes)} of the {mib(self.limit_bytes)} that snapshot_mib allows"
            )


def mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes >= 10 << 20 else f"{nbytes / (1 << 20):.1f} MiB"
