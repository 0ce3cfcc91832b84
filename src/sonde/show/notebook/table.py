"""A table in a notebook: its series with small curves, and its first and last rows."""

from __future__ import annotations

from typing import Final

from sonde.run import Table, is_number, shown_rows
from sonde.schema.losses import shown_scalars
from sonde.show.long_table import LongTable
from sonde.show.notebook.curve import curve
from sonde.show.notebook.style import dim, grid, safe
from sonde.show.term.number import counted, number
from sonde.show.term.text import plain

MAX_ROWS_TO_SPLIT: Final = 2_000_000
"""Longer tables are shown without curves: splitting them would take seconds."""
_NUM_SERIES: Final = 8
_NUM_COLUMNS: Final = 20
_MIN_POINTS: Final = 3
_MAX_CELL: Final = 120


def table_html(table: Table) -> str:
    """The size of the table, its series, and some rows."""
    size = f"{counted(table.num_rows, 'row')} × {counted(table.num_columns, 'column')}"
    return f"{dim(size)}{_series(table)}{_rows(table)}"


def _series(table: Table) -> str:
    if table.num_rows > MAX_ROWS_TO_SPLIT:
        return ""
    found = LongTable(table)
    if table.num_rows * len(found.values) < _MIN_POINTS * max(len(found), 1):
        return ""  # too few steps for curves
    logged = set(shown_scalars(found.names))  # before those that sonde measures for its rules
    order = sorted(range(len(found)), key=lambda index: found.names[index] not in logged)
    rows = [_line(found, index) for index in order[:_NUM_SERIES]]
    more = len(found) - _NUM_SERIES
    rest = dim(f"and {more:,} more series") if more > 0 else ""
    return grid(("series", "", "first", "last"), rows, (False, False, True, True)) + rest


def _line(found: LongTable, index: int) -> list[str]:
    steps, values = found.series(index)
    ends = number(float(values[0])), number(float(values[-1]))
    return [safe(found.names[index]), curve((steps, values)), *ends]


def _rows(table: Table) -> str:
    shown = table.select(table.column_names[:_NUM_COLUMNS])
    cells, gap = shown_rows(shown.arrow)
    rows = [[safe(plain(text, _MAX_CELL)) for text in row] for row in cells]
    if gap is not None:
        rows.insert(gap, ["…"] * shown.num_columns)
    hidden = table.num_columns - shown.num_columns
    rest = dim(f"and {counted(hidden, 'more column')}") if hidden else ""
    return grid([*map(safe, shown.column_names)], rows, [is_number(field.type) for field in shown.schema]) + rest
