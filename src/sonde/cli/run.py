"""`sonde run train.py …`: record an unmodified script. Arguments after its name are passed to the script."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sonde.cli.options import Dir


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script to run; with -m, a module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments for the script, passed unchanged.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, like python -m.")] = False,
    project: Annotated[str | None, typer.Option("--project", "-p", help="Project of the run.")] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Name of the run.")] = None,
    dir: Dir = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", "-t", help="Tag for the run; repeat for several.")] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="Free-text notes.")] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Fraction of the time that recording may add, e.g. 0.01.")
    ] = None,
    record: Annotated[
        list[str] | None,
        typer.Option("--record", metavar="NAME=VALUE", help="What to record: a keyword of sonde.watch. Repeatable."),
    ] = None,
) -> None:
    """Run a training script and record it. The script needs no changes.

    Put sonde's options before the script and the script's own after it. The exit code is the script's. If nothing is
    trained, no run is kept. If the script calls sonde.init or sonde.watch itself, those calls still apply; options
    given here override theirs.

    \b
    Examples:
      sonde run train.py --lr 3e-4
      sonde run --project gpt --name baseline train.py
      sonde run -m mypackage.train --epochs 3
      sonde run --record "snapshots=every(100)" --record "sites=layers.*" train.py
      sonde run --record "snapshots={when: 100, kinds: 'param,grad', store: icechunk}" train.py
    """
    from sonde.session import run_script

    options = {"project": project, "name": name, "dir": dir, "notes": notes, "budget": budget, "tags": tuple(tag or ())}
    given: dict[str, Any] = {key: value for key, value in options.items() if value not in (None, ())}
    if record:
        given["record"] = _named(record)
    raise typer.Exit(run_script(script, list(arguments or ()), is_module=is_module, **given))


def _named(options: list[str]) -> dict[str, str]:
    from sonde.errors import UsageError

    wrong = [option for option in options if "=" not in option]
    if wrong:
        raise UsageError(f'--record takes NAME=VALUE, for example --record "snapshots=every(100)"; got "{wrong[0]}".')
    return {name.strip(): value for name, _, value in (option.partition("=") for option in options)}
