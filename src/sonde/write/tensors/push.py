"""Uploads the remaining snapshots of a run on request, with the same process that uploads during training."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.errors import RunError, RunLockedError
from sonde.schema.snapshots.tensors import hidden_folder
from sonde.schema.snapshots.uploads import UPLOAD_FILE
from sonde.write.tensors.local import LocalStore
from sonde.write.tensors.upload import TIMEOUT_S, Spool, command_line

_POLL_S: Final = 0.05

Told = Callable[[int, int], None]
"""Called with the number of finished uploads and the total."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result, over all ranks."""

    url: str
    uploaded: int
    """Uploads in this call."""
    waiting: int
    last_error: str


def push(run: Path, *, patience_s: float = 60.0, timeout_s: float = TIMEOUT_S, told: Told = lambda *_: None) -> Pushed:
    """Upload waiting snapshots. Gives up after `patience_s` without progress; the rest waits for the next time."""
    spools = [Spool(run, rank) for rank in _ranks(run)]
    if not spools:
        raise RunError(
            f"nothing to upload: {run} stores its snapshots locally. To use a bucket, pass "
            'snapshots=sonde.Snapshots(store="s3://…").'
        )
    total = _waiting(spools)
    told(0, total)
    for spool in spools:
        if _waiting([spool]):
            _push(spool, patience_s, timeout_s, lambda: told(total - _waiting(spools), total))
        _sweep(spool)
    states = [spool.state() for spool in spools]
    errors = [state.last_error for state in states if state.last_error]
    return Pushed(states[0].url, total - _waiting(spools), _waiting(spools), "; ".join(errors))


def _push(spool: Spool, patience_s: float, timeout_s: float, tell: Callable[[], None]) -> None:
    _refuse_two(spool)
    options: dict[str, Any] = {
        "run": str(spool.run.absolute()),
        "rank": spool.rank,
        "linger_s": patience_s,
        "timeout_s": timeout_s,
        "parent": os.getpid(),
    }
    with (hidden_folder(spool.run) / "uploader.log").open("ab") as log:
        # Without input it runs on its own from the start: it ends when everything is done, or when there is no
        # progress.
        process = subprocess.Popen(
            command_line(options), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log
        )
    try:
        while process.poll() is None:
            time.sleep(_POLL_S)
            tell()
    except BaseException:
        process.kill()
        process.wait()
        raise
    tell()


def _refuse_two(spool: Spool) -> None:
    try:
        spool.lock().release()
    except RunLockedError as error:
        last = spool.state().last_error
        raise RunLockedError(
            f"the run's own uploader is still uploading {_waiting([spool])} snapshots; it keeps trying for a few "
            f"minutes after training{f', but its last attempt failed ({last})' if last else ''}. Try again when it has "
            "ended."
        ) from error


def _sweep(spool: Spool) -> None:
    """Delete local copies of uploaded snapshots, unless they are to be kept."""
    state = spool.state()
    if state.keeps_local or not (set(spool.keys()) & state.uploaded.keys()):
        return
    local = LocalStore(spool.run, rank=spool.rank)
    try:
        local.delete_copies(state.uploaded)
    finally:
        local.close()


def _waiting(spools: list[Spool]) -> int:
    return sum(len(spool.state().waiting(spool.keys())) for spool in spools)


def _ranks(run: Path) -> list[int]:
    hidden = hidden_folder(run)
    ranks = [0] if (hidden / UPLOAD_FILE).exists() else []
    others = [path.parent.name.removeprefix("rank-") for path in hidden.glob(f"rank-*/{UPLOAD_FILE}")]
    return sorted([*ranks, *(int(rank) for rank in others if rank.isdecimal())])
