"""`sonde list`: the runs there are, newest first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer

from sonde.cli.options import Dir, Json, runs_dir
from sonde.cli.output import print_json, remark
from sonde.show.term.number import age, count, duration, number

if TYPE_CHECKING:
    from sonde.run import Run

WIDE: Final = 100
SORTS: Final = ("created", "name", "steps", "loss", "duration")


def list_runs(
    project: Annotated[str | None, typer.Option("--project", "-p", help="Only runs of this project.")] = None,
    status: Annotated[
        str | None, typer.Option("--status", "-s", help="Only running, finished, crashed or interrupted runs.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", "-t", help="Only runs with this tag.")] = None,
    sort: Annotated[str, typer.Option("--sort", help="By created, name, steps, loss or duration.")] = "created",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many runs.")] = 50,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """List runs, with their status and loss.

    \b
    Examples:
      sonde list
      sonde list --project gpt --status crashed
      sonde list --sort loss --limit 5 --json
    """
    from sonde.errors import UnknownNameError
    from sonde.run import broken_runs, runs
    from sonde.schema.layout import RunStatus

    if status is not None and status not in get_args(RunStatus):
        raise UnknownNameError("status", status, get_args(RunStatus))
    if sort not in SORTS:
        raise UnknownNameError("order", sort, SORTS)
    folder = runs_dir(dir)
    found = [
        run
        for run in runs(folder, project=project)
        if (status is None or run.status == status) and (tag is None or tag in run.tags)
    ]
    if sort == "created":  # newest first already: the loss of those that are not shown is never read
        found, num_left = found[:limit], max(len(found) - limit, 0)
        rows = [_row(run) for run in found]
    else:
        rows = sorted(map(_row, found), key=_key(sort))
        rows, num_left = rows[:limit], max(len(rows) - limit, 0)
    if json:
        print_json([{key: value for key, value in row.items() if key != "series"} for row in rows])
    elif rows:
        _show(rows)
    if any(row["warnings"] for row in rows) and not json:
        remark("! something is wrong with the recording: `sonde show` says what.")
    for path, error in broken_runs(folder).items():
        remark(f"left out {path}: {error}")
    if num_left:
        remark(f"{num_left} more; show them with --limit {len(rows) + num_left}.")
    if not rows:
        filters = any(value is not None for value in (project, status, tag))
        remark(f"no runs{' like that' if filters else ''} in {folder}. Record one:  sonde run train.py")


def _row(run: Run) -> dict[str, Any]:
    from sonde.show.summary import describe, loss_series

    return {**describe(run), "series": loss_series(run)}


def _key(sort: str) -> Callable[[dict[str, Any]], Any]:
    def loss(row: dict[str, Any]) -> float:
        value = row["loss"]["last"] if row["loss"] else float("nan")
        return float("inf") if value != value else value  # NaN is no order

    keys: dict[str, Callable[[dict[str, Any]], Any]] = {
        "name": lambda row: (row["project"], row["name"]),
        "steps": lambda row: -row["last_step"],
        "loss": loss,
        "duration": lambda row: -(row["duration_s"] or 0.0),
    }
    return keys[sort]


def _show(rows: list[dict[str, Any]]) -> None:
    from datetime import datetime

    from sonde.show.term.console import is_ascii, make_console
    from sonde.show.term.sparkline import sparkline
    from sonde.show.term.table import Column, status_text, table

    console = make_console()
    is_wide = console.width >= WIDE
    now = time.time()
    columns = [
        Column("status"),
        Column("run", cut=True),
        Column("id", style="dim"),
        Column("steps", right=True),
        Column("loss", right=True),
        Column(""),
        *([Column("found"), Column("took", right=True)] if is_wide else []),
        Column("began", right=True, style="dim"),
        Column("", style="yellow"),
    ]
    cells = [
        (
            status_text(row["status"]),
            f"{row['project']}/{row['name']}",
            row["id"],
            count(row["last_step"] + 1),
            number(row["series"].last) if row["series"] else "–",
            sparkline(row["series"].values, 16 if is_wide else 8, ascii=is_ascii(console)) if row["series"] else "",
            *([_worst(row["findings"]), duration(row["duration_s"])] if is_wide else []),
            age(now - datetime.fromisoformat(row["created"]).timestamp()),
            "!" if row["warnings"] else "",
        )
        for row in rows
    ]
    console.print(table(columns, cells))


def _worst(findings: dict[str, int] | None) -> Any:
    """The gravest of what was found while it trained."""
    from rich.text import Text

    from sonde.show.diagnosis import counts_in_words
    from sonde.show.term.table import SEVERITY_STYLES

    if findings is None:
        return "–"
    for severity in ("critical", "warning"):
        if findings.get(severity):
            return Text(counts_in_words({severity: findings[severity]}), style=SEVERITY_STYLES[severity])
    return ""
