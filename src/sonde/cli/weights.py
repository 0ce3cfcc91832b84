"""`sonde weights RUN`: where each whole tensor of a snapshot stands, and how far it has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json
from sonde.show.term.number import number
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.run import Run

_COLUMNS: Final = {
    "norm": "norm",
    "relative_from_first": "moved",
    "cosine_first": "cosine",
    "relative_change": "last change",
    "spectral_norm": "σ1",
    "stable_rank": "stable rank",
    "effective_rank": "effective rank",
    "alpha": "alpha",
}


def weights(
    run: RunName,
    pattern: Annotated[str, typer.Argument(metavar="GLOB", help="Which tensors, as grad/layers.3.*")] = "param/*",
    at: Annotated[int | None, typer.Option("--at", help="The snapshot's step; negative counts from the last.")] = None,
    spectra: Annotated[bool, typer.Option("--spectra/--no-spectra", help="Singular values of matrices too.")] = True,
    top: Annotated[int, typer.Option("--top", min=1, help="How many tensors to show.")] = 40,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Whole tensors of a snapshot: how far they have moved since the first, and what rank they have.

    Needs a run that kept snapshots: sonde.watch(model, snapshots=sonde.every(500)).

    \b
    Examples:
      sonde weights latest
      sonde weights latest "grad/*" --at 500
      sonde weights latest --no-spectra --json
    """
    from sonde.show.progress import progress

    found = open_run(run, dir)
    with progress("tensors", quiet=json) as tell:
        table = found.tensors.standing(pattern, step="latest" if at is None else at, spectra=spectra, on_tensor=tell)
    rows = table.to_pylist()
    step = rows[0]["step"] if rows else -1
    if json:
        print_json({"run": found.id, "step": step, "tensors": rows})
    else:
        _show(found, step, rows, top)


def _show(run: Run, step: int, rows: list[dict[str, Any]], top: int) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    console = make_console()
    console.print(f"{plain(run.project)}/{plain(run.name)}, snapshot of step {step:,}: the most moved first")
    columns = [Column("tensor", cut=True), *(Column(title, right=True) for title in _COLUMNS.values())]
    console.print(table(columns, [(_name(row), *(_cell(row[key]) for key in _COLUMNS)) for row in rows[:top]]))
    if len(rows) > top:
        console.print(f"{len(rows) - top} more; show them with --top {len(rows)}.", style="dim")
    broken = [_name(row) for row in rows if row["nonfinite"]]
    if broken:
        console.print(
            f"{len(broken)} have values that are not finite: {plain(', '.join(broken[:5]))}", style="bold red"
        )


def _name(row: dict[str, Any]) -> str:
    return f"{row['kind']}/{row['site']}"


def _cell(value: float | None) -> str:
    return "–" if value is None or value != value else number(value)
