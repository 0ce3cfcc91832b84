"""`sonde monitor`: live view of runs in the terminal."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from sonde.cli.options import Dir, Json, runs_dir
from sonde.cli.output import print_json


def monitor(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|DIR]", help="A run, or a folder of runs or checkpoints. Default: all runs."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Monitor runs live in the terminal.

    Shows loss, speed, findings, and the layers that stand out. Works over ssh and in tmux. Press `?` for the keys. If
    there is no run yet, it waits for one.

    \b
    Examples:
      sonde monitor
      sonde monitor runs/latest
      sonde monitor latest --once
      sonde monitor ./checkpoints
    """
    from sonde.errors import MissingPackageError, UsageError
    from sonde.show.monitor.target import find_target
    from sonde.show.monitor.watching import WatchedRuns

    watching = WatchedRuns(find_target(what, runs_dir(dir)))
    if json or once:
        _print_once(watching, as_json=json)
        return
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise UsageError("sonde monitor needs a terminal. In a pipe or a script, use  sonde monitor --once")
    for package in ("textual", "textual_plotext"):
        if find_spec(package) is None:
            raise MissingPackageError(package, "monitor", "monitoring runs in the terminal")
    from sonde.show.monitor.app import monitor as show

    show(watching)


def _print_once(watching: object, *, as_json: bool) -> None:
    from sonde.show.monitor.once import draw
    from sonde.show.monitor.watching import WatchedRuns
    from sonde.show.term.console import make_console

    assert isinstance(watching, WatchedRuns)
    frame = watching.look()
    if watching.reading is not None and watching.reading.is_worth_judging():
        frame = watching.judge()
    if as_json:
        print_json(frame.as_dict())
        return
    console = make_console()
    console.print(draw(frame, console))
