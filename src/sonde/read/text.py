"""Tables as plain text: a few rows, aligned, at most as wide as the terminal."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import pyarrow as pa

from sonde.display import visible

EDGE_ROWS: Final = 5
"""Number of rows shown at each end of a long table."""
_GAP: Final = "  "
_NARROWEST: Final = 8


def terminal_width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)


def cell(value: object, column: str = "") -> str:
    """A value as text: numbers with five significant digits, times as dates.

    >>> [cell(x) for x in (0.1234567, 12345678.0, 3, None, [4, 8])], cell(0.0, "time")
    (['0.12346', '1.2346e+07', '3', '–', '[4, 8]'], '1970-01-01 00:00:00')
    """
    if value is None:
        return "–"
    if isinstance(value, float) and column == "time" and math.isfinite(value):
        value = datetime.fromtimestamp(min(max(value, 0.0), 2e11), UTC)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return f"{value:.5g}" if isinstance(value, float) else visible(value)


def shown_rows(table: pa.Table, edge_rows: int = EDGE_ROWS) -> tuple[list[list[str]], int | None]:
    """The first and last rows as text, and the position of the gap between them; None if there is no gap."""
    num_rows = table.num_rows
    if num_rows <= 2 * edge_rows:
        return _cells(table), None
    return [*_cells(table.slice(0, edge_rows)), *_cells(table.slice(num_rows - edge_rows))], edge_rows


def _cells(table: pa.Table) -> list[list[str]]:
    names = table.column_names
    columns = [
        [cell(value, name) for value in column.to_pylist()] for name, column in zip(names, table.columns, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def is_number(type: pa.DataType) -> bool:
    """Whether a column of this type is aligned to the right."""
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type))


def table_text(table: pa.Table, width: int | None = None) -> str:
    """The size of a table, its column names, and its first and last rows."""
    rows, gap = shown_rows(table)
    names = [visible(name) for name in table.column_names]
    size = f"{table.num_rows:,} {'row' if table.num_rows == 1 else 'rows'}"
    if not names:
        return f"Table: {size}, no columns"
    right = [is_number(field.type) for field in table.schema]
    lines, num_hidden = aligned(names, rows, right, terminal_width() if width is None else width)
    if gap is not None:
        lines.insert(1 + gap, "…")
    hidden = f" ({num_hidden} of them not shown)" if num_hidden else ""
    return "\n".join([f"Table: {size} × {len(names)} {'column' if len(names) == 1 else 'columns'}{hidden}", *lines])


def aligned(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], width: int
) -> tuple[list[str], int]:
    """A heading and rows in columns, and the number of columns that do not fit: those on the right are left out.

    >>> aligned(["step", "name"], [["0", "loss"], ["10", "loss"]], [True, False], 80)
    (['step  name', '   0  loss', '  10  loss'], 0)
    """
    widths = [max([len(name), *(len(row[i]) for row in rows)]) for i, name in enumerate(names)]
    while _total(widths) > width:
        able = [i for i, size in enumerate(widths) if not right[i] and size > max(len(names[i]), _NARROWEST)]
        if able:
            widths[max(able, key=lambda i: widths[i])] -= 1
        elif len(widths) > 1:
            widths.pop()
        else:
            break
    lines = [
        _GAP.join(
            _fit(text, size, is_right) for text, size, is_right in zip(line, widths, right, strict=False)
        ).rstrip()
        for line in (names, *rows)
    ]
    return lines, len(names) - len(widths)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _fit(text: str, width: int, is_right: bool) -> str:
    short = text if len(text) <= width else f"{text[: width - 1]}…"
    return short.rjust(width) if is_right else short.ljust(width)
