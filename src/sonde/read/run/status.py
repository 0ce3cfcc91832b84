"""The true status of a run that claims to be running: whether a process holds its lock. Never disturbs the writer."""

from __future__ import annotations

import errno
import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde.errors import CorruptError
from sonde.read.run.folder import open_inside, read_manifest
from sonde.read.run.manifest import Manifest
from sonde.schema.layout import (
    ENDED_AT_EXIT,
    ENDING_FILE,
    EXIT_CODE_FILE,
    LOCK_FILE,
    UNKNOWN_CODE,
    RunStatus,
    ending_of,
    lost,
)
from sonde.schema.records import check_document

HEARTBEAT_LIMIT_S: Final = 30.0
"""Without a lock to check (another host, no locks), a run without a heartbeat for this long has ended."""


_MAX_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Status:
    status: RunStatus
    reason: str
    is_lost: bool = False
    """Whether the process disappeared without a final status."""


def true_status(run: Path, manifest: Manifest, last_step: int) -> Status:
    """The true status: the one in run.json, except that a run without a writer is not running, and that the exit code
    of the process decides between finished and crashed."""
    if manifest.status == "running" and not is_alive(run, manifest):
        manifest = read_manifest(run)  # it may have written its final status just before releasing the lock
    if manifest.status != "running":
        return _by_exit_code(run, manifest)
    if is_alive(run, manifest):
        return Status(manifest.status, manifest.reason)
    return announced_ending(run, manifest) or Status("crashed", lost(last_step), is_lost=True)


def announced_ending(run: Path, manifest: Manifest) -> Status | None:
    """The announced ending of a run whose process ended before its writer was done; None if there is none."""
    try:
        with open_inside(run, ENDING_FILE) as file:
            text = file.read(_MAX_BYTES)
        said = json.loads(text) if check_document(text) else {}
    except (OSError, CorruptError, ValueError, RecursionError):
        return None
    is_same = isinstance(said, dict) and (said.get("pid"), said.get("host")) == (manifest.pid, manifest.host)
    if not is_same or said.get("status") not in ("finished", "crashed", "interrupted"):
        return None
    return Status(said["status"], str(said.get("reason") or ""))


def _by_exit_code(run: Path, manifest: Manifest) -> Status:
    said = Status(manifest.status, manifest.reason)
    if not manifest.facts.get(ENDED_AT_EXIT) or manifest.status == "interrupted":
        return said
    code = _exit_code(run)
    if code is None or code == UNKNOWN_CODE or (code and manifest.status != "finished"):
        return said
    return Status(*ending_of(code))


def _exit_code(run: Path) -> int | None:
    try:
        with open_inside(run, EXIT_CODE_FILE) as file:
            found = file.read(1)
    except (OSError, CorruptError):
        return None
    return found[0] if found else None


def is_alive(run: Path, manifest: Manifest) -> bool:
    """Whether a process is still writing to the run."""
    if manifest.host in ("", socket.gethostname()):
        held = is_locked(run)
        if held is not None:
            return held
    last_sign = max(manifest.heartbeat.time, manifest.created_time)
    return time.time() - last_sign < HEARTBEAT_LIMIT_S


def is_locked(run: Path) -> bool | None:
    """Whether a process holds the run's lock; None if that cannot be determined.

    Tries a shared lock without waiting, on a read-only descriptor, and releases it immediately.
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
