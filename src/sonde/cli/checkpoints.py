"""`sonde checkpoints RUN|FOLDER`: list, verify or delete checkpoints."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json, runs_dir
from sonde.cli.output import confirm, print_json, remark
from sonde.show.term.number import counted, number, size

if TYPE_CHECKING:
    from sonde.run import Checkpoint


_HINT: Final = "Save some:  sonde.tune.CheckpointManager(...)"


def checkpoints(
    where: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run, or a folder of checkpoints.")] = "latest",
    verify: Annotated[bool, typer.Option("--verify", help="Read every file completely and compare its hash.")] = False,
    delete: Annotated[
        list[int] | None,
        typer.Option("--delete", metavar="STEP", help="Delete the checkpoint of this step; repeat for several."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """List, verify or delete checkpoints.

    The list includes the metrics saved in each. The exit code is 1 if a checkpoint is damaged.

    \b
    Examples:
      sonde checkpoints latest
      sonde checkpoints runs/gpt/20250101-120000-baseline --verify
      sonde checkpoints checkpoints --delete 100 --delete 200 --yes
    """
    from sonde.run import list_checkpoints, verify_checkpoint

    folder = find_folder(where, dir)
    if delete:
        _delete(folder, delete, yes=yes, json=json)
        return
    found = list_checkpoints(folder)
    problems = {c.step: verify_checkpoint(c.path) if verify else [c.problem] * bool(c.problem) for c in found}
    rows = [_row(checkpoint, problems[checkpoint.step]) for checkpoint in found]
    if json:
        print_json(rows)
    elif rows:
        _show(rows, verified=verify)
    else:
        elsewhere = _elsewhere(folder)
        hint = f"They are in {elsewhere}:  sonde checkpoints {elsewhere}" if elsewhere else _HINT
        remark(f"No checkpoints in {folder}. {hint}")
    if any(problems.values()):
        raise typer.Exit(1)


def find_folder(where: str, dir: Path | None) -> Path:
    """The checkpoints folder of a run, or the given folder if it holds checkpoints."""
    from sonde.run import checkpoints_folder, find_run, list_checkpoints

    path = Path(where)
    if path.is_dir() and list_checkpoints(checkpoints_folder(path)):
        return checkpoints_folder(path)
    return checkpoints_folder(find_run(where, runs_dir(dir)))


def _elsewhere(run: Path) -> Path | None:
    """The folder in which the run recorded saving its checkpoints."""
    from sonde.run import Run
    from sonde.schema.layout import CATALOG_FILE

    if not (run / CATALOG_FILE).is_file():
        return None
    return next((Path(path).parent for path in Run(run).checkpoints()["path"].to_pylist()), None)


def _row(checkpoint: Checkpoint, problems: list[str]) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "time": checkpoint.time,
        "bytes": checkpoint.num_bytes,
        "metrics": dict(checkpoint.metrics),
        "path": str(checkpoint.path),
        "problems": problems,
    }


def _show(rows: list[dict[str, Any]], *, verified: bool) -> None:
    from datetime import UTC, datetime

    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    columns = [
        Column("step", right=True),
        Column("saved (UTC)"),
        Column("size", right=True),
        Column("metrics", cut=True),
        Column("state", cut=True),
    ]
    good = "verified" if verified else "complete"
    cells = [
        (
            f"{row['step']:,}",
            f"{datetime.fromtimestamp(row['time'], UTC):%Y-%m-%d %H:%M:%S}" if row["time"] else "",
            size(row["bytes"]),
            ", ".join(f"{name} {number(value)}" for name, value in row["metrics"].items()),
            "; ".join(row["problems"]) or good,
        )
        for row in rows
    ]
    make_console().print(table(columns, cells))


def _delete(folder: Path, steps: list[int], *, yes: bool, json: bool) -> None:
    from sonde.errors import RunNotFoundError
    from sonde.run import list_checkpoints
    from sonde.show.trash import held

    found = {c.step: c for c in list_checkpoints(folder)}
    missing = [step for step in steps if step not in found]
    if missing:
        has = ", ".join(map(str, found)) or "none"
        raise RunNotFoundError(f"no checkpoint of step {missing[0]} in {folder}. Available steps: {has}.")
    if not yes:
        confirm(f"Permanently delete {len(set(steps))} of {counted(len(found), 'checkpoint')}?")
    with held(folder, f"a checkpoint is being saved in {folder}. Try again in a moment."):
        for step in dict.fromkeys(steps):
            _remove(found[step].path)
    if json:
        print_json([{"step": step, "path": str(found[step].path)} for step in dict.fromkeys(steps)])
    else:
        print(f"Deleted {len(set(steps))} of {counted(len(found), 'checkpoint')} in {folder}.")


def _remove(path: Path) -> None:
    """Delete a checkpoint by renaming it first, so that no one sees half of it."""
    hidden = path.with_name(f".deleting-{secrets.token_hex(4)}")
    path.rename(hidden)
    shutil.rmtree(hidden)
