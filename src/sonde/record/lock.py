"""Exactly one writer per run, by `flock` on the file `lock`. The kernel frees it however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Final

from sonde.errors import RunError, RunLockedError
from sonde.schema.layout import LOCK_FILE

PATIENCE_S: Final = 1.0
"""A reader that asks whether a run is alive holds a shared lock for a moment; that is no second writer."""


class RunLock:
    """Held from construction to `release`."""

    def __init__(self, run: Path, *, patience_s: float = PATIENCE_S) -> None:
        self.fd = -1
        try:
            fd = os.open(run / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"cannot lock {run}: {error.strerror}. Is the folder writable?") from error
        try:
            _acquire(fd, run, patience_s)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    def release(self) -> None:
        """Let go. Closing is enough, unless a forked child still holds a copy: so unlock first."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: close our copy. Unlocking would take the lock from the parent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def is_held(run: Path) -> bool:
    """Whether some process writes to this run."""
    try:
        fd = os.open(run / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _acquire(fd: int, run: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise RunError(
                    f"cannot lock {run}: {error.strerror}. This file system has no locks; set SONDE_DIR to another."
                ) from error
            if time.monotonic() >= end:
                raise RunLockedError(
                    f"{run} is being written by another process. Wait for it to end, or start a run of its own."
                ) from error
            time.sleep(0.01)
        else:
            return
