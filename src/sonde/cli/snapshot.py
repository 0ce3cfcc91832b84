"""`sonde snapshot RUN`: ask a run that is being recorded to keep whole tensors of its next step."""

from __future__ import annotations

import json as json_format
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark
from sonde.show.term.number import size
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.run import Run

POLL_S: Final = 0.1
_DEAF_POLLS: Final = 600
"""A run looks for requests at each of its heartbeats; one that has not by then never will."""
_LOOK_EVERY: Final = 10
"""Whether the run is still alive is asked at every n-th poll."""


def snapshot(
    run: RunName = "latest",
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds", "-k", metavar="KINDS", help="param, grad, act, optim, batch, probe; several with commas, or all."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is on disk; or only ask, and go.")
    ] = True,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait; 0 for as long as the run lives."),
    ] = 0.0,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Keep whole tensors of a running run's next step: parameters, or what --kinds says.

    The run notices within seconds, copies the tensors while it trains on, and writes them in the background. Exits 0
    when the snapshot is on disk, 1 when there is none.

    \b
    Examples:
      sonde snapshot latest
      sonde snapshot gpt/baseline --kinds param,grad,optim
      sonde snapshot latest --no-wait
    """
    wanted = None if kinds is None else _kinds(kinds)
    found = open_run(run, dir)
    _refuse_ended(found)
    request = _ask(found.path, wanted, wait=wait)
    if not wait:
        answer: dict[str, Any] = {"state": "asked", "id": request.stem}
    else:
        with _said(f"asked {found.project}/{found.name}; waiting for its next step …"):
            answer = _answer(found, request, timeout_s)
    if json:
        print_json({"run": found.id, **answer})
    else:
        _tell(answer, f"{found.project}/{found.name}")
    if answer["state"] not in ("taken", "asked"):
        raise typer.Exit(1)


def _kinds(text: str) -> list[str]:
    """Those of the option; a wrong one is said here, and not by a run that has better things to do."""
    from sonde.errors import UnknownNameError
    from sonde.schema.snapshots.tensors import SNAPSHOT_KINDS

    wanted = [kind.strip() for kind in text.split(",") if kind.strip()]
    if "all" in wanted:
        return ["all"]
    for kind in wanted or [text]:
        if kind not in SNAPSHOT_KINDS:
            raise UnknownNameError("kind of snapshot", kind, (*SNAPSHOT_KINDS, "all"))
    return wanted


def _refuse_ended(run: Run) -> None:
    from sonde.errors import RunError

    if run.status != "running":
        raise RunError(
            f"run {run.id} ({run.project}/{run.name}) has ended: it is {run.status}. Only a run that is being recorded "
            "can take a snapshot; `sonde list` shows which are running."
        )


def _ask(run: Path, kinds: list[str] | None, *, wait: bool) -> Path:
    """The request, under its name only when it is whole."""
    from sonde.errors import RunError
    from sonde.schema.layout import REQUESTS_FOLDER

    path = run / REQUESTS_FOLDER / f"{secrets.token_hex(8)}.json"
    content = {"what": "snapshot", "time": time.time(), "wait": wait, **({} if kinds is None else {"kinds": kinds})}
    tmp = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        tmp.write_text(json_format.dumps(content), encoding="utf-8")
        tmp.rename(path)
    except OSError as error:
        raise RunError(f"cannot leave a request in {run}: {error.strerror}. Ask as the user who trains.") from error
    return path


def _answer(run: Run, request: Path, timeout_s: float) -> dict[str, Any]:
    path = request.with_suffix(".answer.json")
    end = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    try:
        for number in range(1 << 62):
            found = _read(path)
            if found.get("state") not in (None, "waiting"):
                return found
            if number % _LOOK_EVERY == _LOOK_EVERY - 1 and not _is_running(run):
                # It may have answered between our look and its end.
                last = _read(path)
                ended = {"state": "lost", "why": "the run ended before it was taken"}
                return last if last.get("state") not in (None, "waiting") else ended
            if number == _DEAF_POLLS and request.exists():
                return {
                    "state": "lost",
                    "why": "the run looks for no requests: an older sonde, or stopped",
                }
            if time.monotonic() > end:
                return {"state": "lost", "why": f"no answer within {timeout_s:g} s; it may still come"}
            time.sleep(POLL_S)
    finally:
        request.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    raise AssertionError("the loop above has no other end")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json_format.loads(path.read_bytes()[:65536])
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_running(run: Run) -> bool:
    from sonde.run import open

    return open(run.path).status == "running"


@contextmanager
def _said(message: str) -> Iterator[None]:
    """On a terminal the note goes away when the answer is there."""
    from sonde.show.term.console import make_console

    console = make_console(stderr=True)
    if not console.is_terminal or os.environ.get("NO_COLOR"):
        remark(message)
        yield
        return
    with console.status(plain(message)):
        yield


def _tell(answer: dict[str, Any], name: str) -> None:
    state, why = answer.get("state"), answer.get("why", "")
    if state == "taken":
        print(plain(f"snapshot of step {answer.get('step')}: {_size(answer)}, {answer.get('num_tensors')} tensors."))
    elif state == "asked":
        remark(f"asked {name}. It takes the snapshot at its next step; run.snapshots() will show it.")
    else:
        remark(f"no snapshot: {str(why or state).rstrip('.')}.")


def _size(answer: dict[str, Any]) -> str:
    nbytes, stored = int(answer.get("nbytes") or 0), int(answer.get("stored_bytes") or 0)
    return f"{size(nbytes)} ({size(stored)} on disk)"
