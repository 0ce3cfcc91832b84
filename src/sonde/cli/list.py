"""`sonde list`: all runs, newest first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from sonde.cli.options import Dir, Json, runs_dir
from sonde.cli.output import print_json, remark
from sonde.show.term.number import age, count, counted, duration, number
from sonde.show.term.text import place

if TYPE_CHECKING:
    from sonde.run import Run
    from sonde.schema.layout import RunStatus

WIDE: Final = 100
WIDEST: Final = 130
SORTS: Final = ("created", "name", "steps", "loss", "duration")


def list_runs(
    project: Annotated[str | None, typer.Option("--project", "-p", help="Only runs of this project.")] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", "-s", help="Only runs with this status: running, finished, crashed or interrupted."),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", "-t", help="Only runs with this tag.")] = None,
    sort: Annotated[str, typer.Option("--sort", help="Sort by created, name, steps, loss or duration.")] = "created",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of runs.")] = 50,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """List runs with their status and loss.

    \b
    Examples:
      sonde list
      sonde list --project gpt --status crashed
      sonde list --sort loss --limit 5 --json
    """
    from sonde.errors import UnknownNameError
    from sonde.run import runs

    if sort not in SORTS:
        raise UnknownNameError("sort order", sort, SORTS)
    folder = runs_dir(dir)
    # Newest first is the order of the folders: only the shown ones are opened.
    found = runs(
        folder, project, status=cast("RunStatus | None", status), tag=tag, limit=limit if sort == "created" else None
    )
    rows = [_row(run) for run in found]
    if sort != "created":
        rows.sort(key=_key(sort))
    rows, num_left = rows[:limit], found.num_left or max(len(rows) - limit, 0)
    if json:
        print_json([{key: value for key, value in row.items() if key != "series"} for row in rows])
    elif rows:
        _show(rows)
    if any(row["warnings"] for row in rows) and not json:
        remark("! The recording of these runs has problems; `sonde show RUN` lists them.")
    for path, error in found.broken.items():
        remark(f"Skipped {path}: {error}")
    if num_left:
        what = "older run" if found.num_left else "more run"
        is_filtered = any(value is not None for value in (project, status, tag))
        unknown = " that may match" if found.num_left and is_filtered else ""
        remark(f"{counted(num_left, what)}{unknown}; show all with --limit {len(rows) + num_left}.")
    if not rows:
        if any(value is not None for value in (project, status, tag)):
            remark(f"No runs match these filters in {place(folder)}.")
        elif dir is not None and not folder.is_dir():
            remark(f"There is no folder {place(folder)}. Record a run:  sonde run train.py")
        else:
            remark(f"No runs in {place(folder)}. Record one:  sonde run train.py")


def _row(run: Run) -> dict[str, Any]:
    from sonde.show.summary import describe, loss_series

    return {**describe(run), "series": loss_series(run)}


def _key(sort: str) -> Callable[[dict[str, Any]], Any]:
    def loss(row: dict[str, Any]) -> float:
        value = row["loss"]["last"] if row["loss"] else float("nan")
        return float("inf") if value != value else value  # NaN cannot be ordered: sort it last

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
    is_wide, is_widest = console.width >= WIDE, console.width >= WIDEST
    now = time.time()
    columns = [
        Column("status"),
        Column("run", cut=True),
        Column("id", style="dim"),
        Column("steps", right=True),
        Column("loss", right=True),
        Column(""),
        *([Column("findings"), Column("took", right=True)] if is_wide else []),
        *([Column("recording took", right=True)] if is_widest else []),
        Column("started", right=True, style="dim"),
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
            *([row["recording"].removeprefix("Recording took ") or "–"] if is_widest else []),
            age(now - datetime.fromisoformat(row["created"]).timestamp()),
            "!" if row["warnings"] else "",
        )
        for row in rows
    ]
    console.print(table(columns, cells))


def _worst(findings: dict[str, int] | None) -> Any:
    """The most severe live findings, as text."""
    from rich.text import Text

    from sonde.show.diagnosis import counts_in_words
    from sonde.show.term.table import SEVERITY_STYLES

    if findings is None:
        return "–"
    for severity in ("critical", "warning"):
        if findings.get(severity):
            return Text(counts_in_words({severity: findings[severity]}), style=SEVERITY_STYLES[severity])
    return ""
