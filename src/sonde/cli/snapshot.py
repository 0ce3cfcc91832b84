"""`sonde snapshot RUN`: ask a run to take a snapshot of its next step, or upload snapshots that still wait here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.help import ADVANCED
from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark
from sonde.show.term.number import counted, size
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.run import Run


def snapshot(
    run: RunName = "latest",
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds", "-k", metavar="KINDS", help="Comma-separated: param, grad, act, optim, batch, probe, or all."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the snapshot is on disk, or return at once.")
    ] = True,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            min=0.0,
            help="Maximum time to wait; 0 waits as long as the run is alive.",
            rich_help_panel=ADVANCED,
        ),
    ] = 0.0,
    upload: Annotated[
        bool,
        typer.Option("--upload", help="Upload the snapshots that are still waiting on this machine; take none."),
    ] = False,
    patience_s: Annotated[
        float,
        typer.Option(
            "--patience",
            metavar="SECONDS",
            help="With --upload: give up after this long without progress.",
            rich_help_panel=ADVANCED,
        ),
    ] = 60.0,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Take a snapshot of a run that is being recorded.

    Saves whole tensors of its next step: parameters, or the given --kinds. The run notices within seconds, copies the
    tensors while it keeps training, and writes them in the background. The exit code is 0 when the snapshot is on disk
    and 1 when there is none.

    A run whose store is a bucket writes snapshots to the local disk first and uploads them while it trains. --upload
    sends what is left, for example after a network failure. You can stop and restart it: nothing is sent twice. The
    exit code is 0 when everything has been uploaded and 1 when snapshots are still waiting.

    \b
    Examples:
      sonde snapshot latest
      sonde snapshot gpt/baseline --kinds param,grad,optim
      sonde snapshot latest --no-wait
      sonde snapshot latest --upload --patience 600
    """
    from sonde.schema.snapshots.tensors import parse_kinds
    from sonde.show.snapshot_request import refuse_ended, request_snapshot

    if upload:
        _upload(open_run(run, dir), patience_s, name=run, as_json=json)
        return
    wanted = None if kinds is None else parse_kinds(kinds)  # rejected here rather than by the run
    found = open_run(run, dir)
    refuse_ended(found)
    if wait:
        name = f"{found.project}/{found.name}"
        with _shown_while_waiting(f"Requested a snapshot of {name}; waiting for its next step …"):
            answer = request_snapshot(found, wanted, timeout_s=timeout_s)
    else:
        answer = request_snapshot(found, wanted, wait=False)
    if json:
        print_json({"run": found.id, **answer})
    else:
        _print_result(answer, f"{found.project}/{found.name}")
    if answer["state"] not in ("taken", "asked"):
        raise typer.Exit(1)


def _upload(run: Run, patience_s: float, *, name: str, as_json: bool) -> None:
    from sonde.show.term.progress import progress
    from sonde.write.tensors.push import push

    with progress("snapshots", quiet=as_json) as advance:
        pushed = push(run.path, patience_s=patience_s, told=advance)
    if as_json:
        print_json(asdict(pushed))
    else:
        print(f"{pushed.uploaded} uploaded to {pushed.url}, {pushed.waiting} waiting")
        if pushed.waiting:
            error = pushed.last_error or "no response"
            remark(f"Last error: {error}. Try again:  sonde snapshot {name} --upload")
    if pushed.waiting:
        raise typer.Exit(1)


@contextmanager
def _shown_while_waiting(message: str) -> Iterator[None]:
    """Show a message while waiting; on a terminal it disappears afterwards."""
    from sonde.show.term.console import make_console

    console = make_console(stderr=True)
    if not console.is_terminal or os.environ.get("NO_COLOR"):
        remark(message)
        yield
        return
    with console.status(plain(message)):
        yield


def _print_result(answer: dict[str, Any], name: str) -> None:
    state, why = answer.get("state"), answer.get("why", "")
    if state == "taken":
        print(
            plain(
                f"Snapshot of step {answer.get('step')}: {_size(answer)}, "
                f"{counted(answer.get('num_tensors') or 0, 'tensor')}."
            )
        )
    elif state == "asked":
        remark(
            f"Requested a snapshot of {name}. It is taken at the next step and then listed by run.tensors.snapshots()."
        )
    else:
        remark(f"No snapshot: {str(why or state).rstrip('.')}.")


def _size(answer: dict[str, Any]) -> str:
    nbytes, stored = int(answer.get("nbytes") or 0), int(answer.get("stored_bytes") or 0)
    return f"{size(nbytes)} ({size(stored)} on disk)"
