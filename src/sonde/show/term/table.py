"""Tables for the terminal: columns are declared once, cells are text and never markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.table import Table
from rich.text import Text

from sonde.show.term.text import plain

STATUS_STYLES: Final = {"running": "cyan", "finished": "green", "crashed": "bold red", "interrupted": "yellow"}
SEVERITY_STYLES: Final = {"info": "", "warning": "yellow", "critical": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column's heading and how its cells stand."""

    title: str
    right: bool = False
    style: str = ""
    wrap: bool = False
    """Whether long cells go on in the next line; the others are cut with an ellipsis where the terminal is narrow."""


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], *, header: bool = True) -> Table:
    """A table whose strings come out as they are, whatever they contain.

    >>> table([Column(title="name")], [["[red]x"]]).row_count
    1
    """
    drawn = Table(box=box.SIMPLE_HEAD, show_header=header, pad_edge=False, show_edge=False)
    for column in columns:
        drawn.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            style=column.style,
            no_wrap=not column.wrap,
            overflow="fold" if column.wrap else "ellipsis",
        )
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
    return drawn


def status_text(status: str) -> Text:
    """A run's status in its colour."""
    return Text(plain(status), style=STATUS_STYLES.get(status, ""))


def severity_text(severity: str) -> Text:
    """An event's severity in its colour."""
    return Text(plain(severity), style=SEVERITY_STYLES.get(severity, ""))
