"""Exactly one writer per run, by `flock` on the file `lock`. The kernel releases it however the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Final

from sonde.errors import RunError, RunLockedError, SondeError
from sonde.schema.layout import LOCK_FILE
from sonde.write.durable import open_file
from sonde.write.runfile import RunFile

PATIENCE_S: Final = 1.0
"""A reader that checks whether a run is alive holds a shared lock for a moment; that is not a second writer."""


class RunLock:
    """Held from construction to `release`."""

    def __init__(self, run: Path, *, patience_s: float = PATIENCE_S) -> None:
        self.fd = -1
        try:
            fd = open_file(run / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunError(f"cannot lock {run}: {error.strerror}. Is the folder writable?") from error
        try:
            _acquire(fd, run, patience_s)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    def release(self) -> None:
        """Release the lock. Closing is enough, unless a forked child still holds a copy: so unlock first."""
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


def _acquire(fd: int, run: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise RunError(
                    f"cannot lock {run}: {error.strerror}. This file system does not support locks; set SONDE_DIR to "
                    "a folder on another one."
                ) from error
            if time.monotonic() >= end:
                raise RunLockedError(_held(run)) from error
            time.sleep(0.01)
        else:
            return


def _held(run: Path) -> str:
    """The holder of the lock, as far as the folder says, and what to do."""
    try:
        content = RunFile.load(run).content
    except SondeError:
        content = {}
    pid, host = content.get("pid"), content.get("host")
    if (pid, host) == (os.getpid(), socket.gethostname()):
        return f"{run} is still being written by an open session in this process. Call its finish() first."
    writer = f"another process, {pid} on {host}" if pid and host else "another process"
    stop = f", or stop it (kill {pid})" if pid else ""
    return (
        f"{run} is being written by {writer}. Wait for it to end{stop}. To start a new run instead, omit resume=; "
        'to resume another one, name it: resume="project/name", or its folder.'
    )
