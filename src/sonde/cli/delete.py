"""`sonde delete RUN …`: move runs to the trash, or delete them permanently. Never touches a running run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.options import Dir, Json, open_run, runs_dir
from sonde.cli.output import confirm, print_json
from sonde.show.term.number import counted
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.run import Run


def delete(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs: folders, ids, project/name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    permanently: Annotated[
        bool, typer.Option("--permanently", help="Delete permanently instead of moving to the trash.")
    ] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Delete runs. They are moved to .trash in the folder of runs; restore one with `mv`.

    \b
    Examples:
      sonde delete 3f2a9c01
      sonde delete gpt/broken gpt/test --yes
      sonde delete latest --permanently
    """
    from sonde.show.trash import delete_run

    folder = runs_dir(dir)
    found = list({run.path: run for run in (open_run(name, dir) for name in names)}.values())
    for run in found:
        _refuse_running(run)
    if not yes:
        _ask(found, permanently)
    moved = []
    for run in found:
        target = delete_run(run, permanently=permanently, dir=folder)
        moved.append({"id": run.id, "path": str(run.path), "trash": None if target is None else str(target)})
    if json:
        print_json(moved)
    else:
        _report(moved)


def _refuse_running(run: Run) -> None:
    from sonde.errors import RunLockedError

    if run.status == "running":
        raise RunLockedError(f"run {run.id} ({run.project}/{run.name}) is running. Stop it first, then delete it.")


def _ask(runs: list[Run], permanently: bool) -> None:
    for run in runs:
        typer.echo(
            f"{plain(run.project)}/{plain(run.name)}  {plain(run.id)}  {counted(run.last_step + 1, 'step')}", err=True
        )
    runs_text = counted(len(runs), "run")
    confirm(f"Permanently delete {runs_text}?" if permanently else f"Move {runs_text} to the trash?")


def _report(moved: list[dict[str, str | None]]) -> None:
    for entry in moved:
        if entry["trash"] is None:
            print(f"Deleted {plain(entry['path'])}")
        else:
            print(f"Moved {plain(entry['path'])} to the trash. To restore it:")
            print(f"  mv {plain(entry['trash'])} {plain(entry['path'])}")
