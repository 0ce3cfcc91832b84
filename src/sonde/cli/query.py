"""`sonde query RUN "select …"`: read-only SQL over the tables of a run."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark
from sonde.show.term.number import counted, number
from sonde.show.term.text import plain

FORMATS: Final = ("table", "csv", "json")


def query(
    run: RunName,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT over stats, scalars, events, runs, …")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of rows.")] = 1000,
    format: Annotated[str, typer.Option("--format", "-f", help="Output format: table, csv or json.")] = "table",
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Query a run with SQL. Queries are read-only and can access only the files of this run.

    \b
    Examples:
      sonde query latest "select step, value from scalars where name = 'loss' order by step"
      sonde query latest "select site, max(norm) from stats where kind = 'grad' group by site"
      sonde query latest "select * from events" --json
    """
    from sonde.errors import UnknownNameError
    from sonde.show.plain_columns import plain_columns

    if format not in FORMATS:
        raise UnknownNameError("format", format, FORMATS)
    answer = open_run(run, dir).sql(sql, limit=limit + 1)
    is_cut = answer.num_rows > limit
    answer = answer.slice(0, limit)
    if json or format == "json":
        print_json(answer.to_pylist())
    elif format == "csv":
        import pyarrow.csv as pa_csv

        sys.stdout.flush()
        pa_csv.write_csv(plain_columns(answer), sys.stdout.buffer)
    else:
        _show(answer)
    if not answer.num_rows:
        remark("No rows match this query.")
    elif is_cut:
        remark(f"Showing only the first {counted(limit, 'row')}; show more with --limit.")


def _show(answer: Any) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    columns = [Column(plain(field.name), right=_is_number(field.type), cut=True) for field in answer.schema]
    rows = zip(*(column.to_pylist() for column in answer.columns), strict=True)
    cells = [[number(cell) if cell is None or isinstance(cell, float) else cell for cell in row] for row in rows]
    make_console().print(table(columns, cells))


def _is_number(type: Any) -> bool:
    return str(type).startswith(("int", "uint", "double", "float", "decimal"))
