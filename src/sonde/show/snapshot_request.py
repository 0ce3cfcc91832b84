"""Asks a running run for a snapshot of its next step, through a file in its folder."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from sonde.errors import RunError
from sonde.run import Run, open
from sonde.schema.layout import REQUESTS_FOLDER
from sonde.schema.snapshots.tensors import parse_kinds

POLL_S: Final = 0.1
_DEAF_POLLS: Final = 600
"""A run checks for requests at every heartbeat; one that has not by then never will."""
_LOOK_EVERY: Final = 10
"""Check at every n-th poll that the run is still alive."""
_ENDED: Final = {"finished": "has already finished", "crashed": "has crashed", "interrupted": "was interrupted"}


def request_snapshot(
    run: Run, kinds: str | Iterable[str] | None = None, *, wait: bool = True, timeout_s: float = 0.0
) -> dict[str, Any]:
    """Ask a running run to keep whole tensors of its next step, and wait until they are on disk.

    `kinds` are those of `sonde.snapshot`. `timeout_s=0` waits as long as the run is alive. The result has a `state`:
    "taken", "asked" (without `wait`), or why there is no snapshot.

    sonde.show.request_snapshot(sonde.open("latest"), "param,grad")
    """
    wanted = None if kinds is None else parse_kinds(kinds)
    refuse_ended(run)
    request = _ask(run.path, wanted, wait=wait)
    return _answer(run, request, timeout_s) if wait else {"state": "asked", "id": request.stem}


def refuse_ended(run: Run) -> None:
    """Raise if the run is no longer recording."""
    if run.status != "running":
        raise RunError(
            f"run {run.id} ({run.project}/{run.name}) {_ENDED[run.status]}. Only a running run can take a snapshot; "
            "find one with  sonde list --status running"
        )


def _ask(run: Path, kinds: list[str] | None, *, wait: bool) -> Path:
    """Write the request file; a rename makes it visible only once it is complete."""
    path = run / REQUESTS_FOLDER / f"{secrets.token_hex(8)}.json"
    content = {"what": "snapshot", "time": time.time(), "wait": wait, **({} if kinds is None else {"kinds": kinds})}
    tmp = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        tmp.write_text(json.dumps(content), encoding="utf-8")
        tmp.rename(path)
    except OSError as error:
        raise RunError(
            f"cannot write a request to {run}: {error.strerror}. Run this as the user who started the training."
        ) from error
    return path


def _answer(run: Run, request: Path, timeout_s: float) -> dict[str, Any]:
    path = request.with_suffix(".answer.json")
    end = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    try:
        for number in range(1 << 62):
            found = _read(path)
            if found.get("state") not in (None, "waiting"):
                return found
            if number % _LOOK_EVERY == _LOOK_EVERY - 1 and open(run.path).status != "running":
                # It may have answered between our check and its end.
                last = _read(path)
                ended = {"state": "lost", "why": "the run ended before it was taken"}
                return last if last.get("state") not in (None, "waiting") else ended
            if number == _DEAF_POLLS and request.exists():
                return {
                    "state": "lost",
                    "why": "the run does not respond to requests: it is suspended or uses an older sonde",
                }
            if time.monotonic() > end:
                return {"state": "lost", "why": f"no answer within {timeout_s:g} s; the snapshot may still be taken"}
            time.sleep(POLL_S)
    finally:
        request.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    raise AssertionError("the loop above has no other end")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()[:65536])
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
