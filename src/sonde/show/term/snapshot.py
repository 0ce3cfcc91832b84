"""The whole tensors of a snapshot as a table: norm, change and rank of each, most moved first."""

from __future__ import annotations

from typing import Any, Final

from sonde.run import Run
from sonde.show.term.console import make_console
from sonde.show.term.number import counted, number
from sonde.show.term.table import Column, table
from sonde.show.term.text import plain

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


def print_snapshot(run: Run, step: int, rows: list[dict[str, Any]], top: int) -> None:
    """Print the rows of `run.tensors.standing`."""
    console = make_console()
    console.print(f"{plain(run.project)}/{plain(run.name)}, snapshot of step {step:,}, most moved first")
    columns = [Column("tensor", cut=True), *(Column(title, right=True) for title in _COLUMNS.values())]
    console.print(table(columns, [(_name(row), *(_cell(row[key]) for key in _COLUMNS)) for row in rows[:top]]))
    if len(rows) > top:
        console.print(f"{counted(len(rows) - top, 'more tensor')}; show all with --top {len(rows)}.", style="dim")
    broken = [_name(row) for row in rows if row["nonfinite"]]
    if broken:
        console.print(
            f"{counted(len(broken), 'tensor')} with non-finite values: {plain(', '.join(broken[:5]))}", style="bold red"
        )


def _name(row: dict[str, Any]) -> str:
    return f"{row['kind']}/{row['site']}"


def _cell(value: float | None) -> str:
    return "–" if value is None or value != value else number(value)
