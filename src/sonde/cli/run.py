"""`sonde run train.py …`: run an unmodified script, watched. What follows the script's name is the script's."""

from __future__ import annotations

from typing import Annotated

import typer

from sonde.cli.options import Dir


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script; with -m, the module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Passed to the script as they are.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    project: Annotated[str | None, typer.Option("--project", "-p", help="The project the run belongs to.")] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for the run.")] = None,
    dir: Dir = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", "-t", help="A tag; may be given several times.")] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="A sentence to find it by.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="The share of a step's time to spend, as 0.01.")
    ] = None,
) -> None:
    """Run a training script, watched. The script need not know of sonde.

    Options of sonde stand before the script, the script's own behind it. The exit code is the script's. A script that
    uses sonde itself keeps its own sonde.init and sonde.watch; options given here win over them.

    \b
    Examples:
      sonde run train.py --lr 3e-4
      sonde run --project gpt --name baseline train.py
      sonde run -m mypackage.train --epochs 3
    """
    from sonde.session import run_script

    options = {"project": project, "name": name, "dir": dir, "notes": notes, "budget": budget, "tags": tuple(tag or ())}
    given = {key: value for key, value in options.items() if value not in (None, ())}
    raise typer.Exit(run_script(script, list(arguments or ()), is_module=is_module, **given))
