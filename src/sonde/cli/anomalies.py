"""`sonde anomalies RUN`: every finding as a row of a table, symptoms beside their causes."""

from __future__ import annotations

from typing import Annotated, Any, get_args

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark


def anomalies(
    run: RunName = "latest",
    type: Annotated[str | None, typer.Option("--type", "-t", help="Only this type; a glob, as '*gradients'.")] = None,
    severity: Annotated[
        str | None, typer.Option("--severity", "-s", help="Only this grave or graver: info, warning or critical.")
    ] = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """List anomalies of a run: a flat table, in order of time.

    Everything the rules found, what is only a symptom too. `sonde diagnose` shows the same by cause.

    \b
    Examples:
      sonde anomalies latest
      sonde anomalies gpt/baseline --severity warning
      sonde anomalies latest --type "*gradients" --json
    """
    from sonde.diagnose.finding import Severity
    from sonde.errors import UnknownNameError
    from sonde.schema.records import Severity as SeverityName
    from sonde.show.diagnosis import anomaly_dicts

    if severity is not None and severity not in get_args(SeverityName):
        raise UnknownNameError("severity", severity, get_args(SeverityName))
    _refuse_type(type)
    found_run = open_run(run, dir)
    rows = [row for row in anomaly_dicts(found_run.diagnosis()) if _is_wanted(row, type, Severity(severity or "info"))]
    if json:
        print_json(rows)
    elif rows:
        _draw(rows)
    else:
        filters = type is not None or severity is not None
        remark(f"no anomalies{' like that' if filters else ''} in {found_run.project}/{found_run.name}.")


def _refuse_type(type: str | None) -> None:
    """A plain name that is no rule's is a mistake; a glob that finds nothing is an answer."""
    from sonde.diagnose.check import all_rules
    from sonde.errors import UnknownNameError

    if type is not None and not any(sign in type for sign in "*?[") and type not in all_rules():
        raise UnknownNameError("type", type, all_rules())


def _is_wanted(row: dict[str, Any], type: str | None, least: Any) -> bool:
    from sonde.schema.names import matches

    return (type is None or matches(type, row["type"])) and least <= row["severity"]


def _draw(rows: list[dict[str, Any]]) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, severity_text, table

    console = make_console()
    columns = [
        Column("steps", right=True),
        Column("severity"),
        Column("type"),
        Column("what", wrap=True),
        Column("caused by", style="dim"),
    ]
    cells = [
        (_steps(row), severity_text(row["severity"]), row["type"], row["message"], row["caused_by"] or "")
        for row in rows
    ]
    console.print(table(columns, cells))


def _steps(row: dict[str, Any]) -> str:
    first, last = row["step"], row["last_step"]
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"
