"""`sonde ui [RUNS]`: the dashboard, in this process, for the browsers of this machine."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.options import Json, runs_dir
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.show.web.server import Dashboard


def ui(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUNS...", help="Folders of runs, or runs. Default: where runs are kept."),
    ] = None,
    port: Annotated[int | None, typer.Option("--port", help="0 for any free one. Default: 7007, or the next.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; beyond this machine add --expose.")] = (
        "127.0.0.1"
    ),
    expose: Annotated[bool, typer.Option("--expose", help="Let other machines in. Read the warning.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="Another name this server is reached by.")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    read_only: Annotated[bool, typer.Option("--read-only", help="No deleting, no acknowledging.")] = False,
    new_token: Annotated[bool, typer.Option("--new-token", help="Do not use the token of the last time.")] = False,
    json: Json = False,
) -> None:
    """Open the dashboard: what is wrong, where, since when, and the heat map of layers and steps.

    It only reads the runs, shows them while they are written, and is reached from this machine alone, with the token in
    the address it prints. Ctrl-C ends it; training does not notice either.

    \b
    Examples:
      sonde ui
      sonde ui runs/gpt experiments/ --port 0
      sonde ui --no-open --json
    """
    from sonde.show.web.server import Address, Dashboard, can_open_browser, opened_browser

    places = [_place(name) for name in runs] if runs else [runs_dir(None)]
    address = Address(host=host, port=port, expose=expose, names=tuple(allow_host or ()))
    dashboard = Dashboard(places, address, read_only=read_only, keep=not new_token)
    if json:
        facts = {"url": dashboard.url, "origin": dashboard.origin, "port": dashboard.port, "pid": os.getpid()}
        print(dumps(facts))  # one line: whoever started us reads it while we go on
    else:
        _say(dashboard, places)
    sys.stdout.flush()
    wants_browser = not no_open and not json and can_open_browser()
    with opened_browser(dashboard.url) if wants_browser else nullcontext():
        dashboard.serve()
    if not json:
        print("\nThe dashboard has ended.")


def _place(name: str) -> Path:
    """A folder as it is; anything else names a run."""
    from sonde.run import find_run

    return Path(name) if Path(name).is_dir() else find_run(name, runs_dir(None))


def _say(dashboard: Dashboard, places: list[Path]) -> None:
    from sonde.show.web.server import is_loopback, tunnel_line

    print(f"sonde shows {', '.join(plain(str(place)) for place in places)}; Ctrl-C ends it.\n\n  {dashboard.url}\n")
    if not is_loopback(dashboard.address.host):
        print(
            "! Every machine that reaches this one can ask for these runs. Only the token in the address protects\n"
            "  them, and it travels unencrypted: whoever reads the network reads it. The better way from\n"
            "  another machine, without --host and --expose:\n"
            f"  {tunnel_line(dashboard.port)}\n"
        )
    elif os.environ.get("SSH_CONNECTION"):
        print(f"From your own machine:  {tunnel_line(dashboard.port)}\n")
