"""The truth about a run that says it is running: whether anybody still holds its lock. Never disturbs the writer."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde.read.folder import open_inside, read_manifest
from sonde.read.manifest import Manifest
from sonde.schema.layout import LOCK_FILE, RunStatus

HEARTBEAT_LIMIT_S: Final = 30.0
"""Without a lock to ask (another host, a file system without locks), a run silent for longer has ended."""


@dataclass(frozen=True, slots=True)
class Status:
    status: RunStatus
    reason: str


def true_status(run: Path, manifest: Manifest, last_step: int) -> Status:
    """What run.json says, except that a run nobody writes to any more is not running."""
    if manifest.status == "running" and not is_alive(run, manifest):
        manifest = read_manifest(run)  # it may have said goodbye just before it let go of the lock
    if manifest.status != "running" or is_alive(run, manifest):
        return Status(manifest.status, manifest.reason)
    return Status("crashed", lost(last_step))


def lost(last_step: int) -> str:
    """What is known of a run whose process is gone."""
    after = f"after step {last_step:,}" if last_step >= 0 else "before its first step"
    return f"ended without a goodbye (killed, out of memory or power loss) {after}"


def is_alive(run: Path, manifest: Manifest) -> bool:
    """Whether a process still writes to the run."""
    if manifest.host in ("", socket.gethostname()):
        held = is_locked(run)
        if held is not None:
            return held
    last_sign = max(manifest.heartbeat.time, manifest.created_time)
    return time.time() - last_sign < HEARTBEAT_LIMIT_S


def is_locked(run: Path) -> bool | None:
    """Whether a process holds the run's lock; None when that cannot be told.

    A shared lock is asked for without waiting, on a descriptor that cannot write, and given back at once.
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        file = open_inside(run, LOCK_FILE)
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
