"""`sonde ui [RUNS]`: serve the dashboard from this process to browsers on this machine."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.help import ADVANCED
from sonde.cli.options import Json, runs_dir
from sonde.show.term.text import place, plain

if TYPE_CHECKING:
    from sonde.show.web.server import Dashboard


def ui(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUNS...", help="Folders of runs, or single runs. Default: the folder of runs."),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Port to listen on; 0 for any free port. Default: 7007 or the next.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            "--host", help="Address to listen on; other machines also need --expose.", rich_help_panel=ADVANCED
        ),
    ] = "127.0.0.1",
    expose: Annotated[
        bool,
        typer.Option(
            "--expose",
            help="Allow access from other machines. Read the warning it prints.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Additional host name to accept; repeat for several.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open a browser.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Disable deleting runs and acknowledging findings.")
    ] = False,
    new_token: Annotated[
        bool, typer.Option("--new-token", help="Create a new access token.", rich_help_panel=ADVANCED)
    ] = False,
    json: Json = False,
) -> None:
    """Open the dashboard in the browser.

    Shows findings, curves, and a heatmap of layers and steps, updated live. It only reads runs, and accepts
    connections only from this machine with the token in the URL it prints. Ctrl-C stops it. Training is unaffected.

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
        print(dumps(facts))  # one line: the parent process reads it while the server keeps running
    else:
        _say(dashboard, places)
    sys.stdout.flush()
    wants_browser = not no_open and not json and can_open_browser()
    with opened_browser(dashboard.url) if wants_browser else nullcontext():
        dashboard.serve()
    if not json:
        print("\nStopped the dashboard.")


def _place(name: str) -> Path:
    """A folder unchanged; any other name is looked up as a run."""
    from sonde.run import find_run

    return Path(name) if Path(name).is_dir() else find_run(name, runs_dir(None))


def _say(dashboard: Dashboard, places: list[Path]) -> None:
    from sonde.show.web.server import is_loopback, tunnel_line

    print(f"Serving {', '.join(plain(place(folder)) for folder in places)} (Ctrl-C to stop).\n\n  {dashboard.url}\n")
    if not dashboard.has_runs:
        print("No runs there yet. They appear in the dashboard as soon as one is recorded:  sonde run train.py\n")
    if not is_loopback(dashboard.address.host):
        print(
            "! Any machine that can reach this one can request these runs. Only the token in the URL protects\n"
            "  them, and it is sent unencrypted: anyone who can read the network traffic can read it. A safer\n"
            "  way from another machine, without --host and --expose:\n"
            f"  {tunnel_line(dashboard.port)}\n"
        )
    elif os.environ.get("SSH_CONNECTION"):
        print(f"From your own machine:  {tunnel_line(dashboard.port)}\n")
