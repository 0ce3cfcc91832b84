"""Tables for the terminal: columns are declared once, cells are text and never markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from sonde.show.term.text import plain

STATUS_STYLES: Final = {"running": "cyan", "finished": "green", "crashed": "bold red", "interrupted": "yellow"}
SEVERITY_STYLES: Final = {"info": "", "warning": "yellow", "critical": "bold red"}
GAP: Final = 2
NARROWEST: Final = 8


@dataclass(frozen=True, slots=True)
class Column:
    """The heading of a column and the layout of its cells."""

    title: str
    _: KW_ONLY
    right: bool = False
    style: str = ""
    wrap: bool = False
    """Whether long cells wrap to the next line."""
    cut: bool = False
    """Whether long cells are cut with an ellipsis on a narrow terminal; the other columns keep their width."""


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table that fits itself to the width available when it is printed."""

    columns: Sequence[Column]
    cells: list[list[Text]]
    header: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        limits = self._limits(options.max_width)
        drawn = Table(
            box=box.SIMPLE_HEAD, show_header=self.header, show_edge=False, pad_edge=False, padding=(0, GAP, 0, 0)
        )
        for column in self.columns:
            drawn.add_column(
                Text(column.title),
                justify="right" if column.right else "left",
                style=column.style,
                no_wrap=not column.wrap,
                overflow="fold" if column.wrap else "ellipsis",
            )
        for row in self.cells:
            drawn.add_row(*(_fit(cell, limit) for cell, limit in zip(row, limits, strict=True)))
        yield drawn

    def _limits(self, width: int) -> list[int]:
        """The width of each column: the widest ones that may be cut shrink first."""
        titles = [cell_len(column.title) if self.header else 0 for column in self.columns]
        widths = [max([title, *(row[i].cell_len for row in self.cells)]) for i, title in enumerate(titles)]
        if any(column.wrap for column in self.columns):
            return widths  # a column that wraps shrinks first, and rich takes care of that
        excess = sum(widths) + (GAP + 1) * (len(widths) - 1) - width
        while excess > 0:
            able = [i for i, column in enumerate(self.columns) if column.cut and widths[i] > max(titles[i], NARROWEST)]
            if not able:
                break
            widest = max(able, key=lambda i: widths[i])
            widths[widest] -= 1
            excess -= 1
        return widths


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], *, header: bool = True) -> FittedTable:
    """A table whose strings are printed verbatim, never interpreted as markup.

    >>> table([Column("name")], [["[red]x"]]).cells
    [[<text '[red]x' [] ''>]]
    """
    cells = [[cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row] for row in rows]
    return FittedTable(columns, cells, header)


def _fit(cell: Text, limit: int) -> Text:
    if cell.cell_len <= limit:
        return cell
    shorter = cell.copy()
    shorter.truncate(limit, overflow="ellipsis")
    return shorter


def status_text(status: str) -> Text:
    """A run's status in its colour."""
    return Text(plain(status), style=STATUS_STYLES.get(status, ""))


def severity_text(severity: str) -> Text:
    """An event's severity in its colour."""
    return Text(plain(severity), style=SEVERITY_STYLES.get(severity, ""))
