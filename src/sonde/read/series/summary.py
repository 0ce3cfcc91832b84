"""Summary of a run, as data and for the terminal. Text from a run is never interpreted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sonde.display import visible
from sonde.read.series.cut import by_series
from sonde.schema.losses import shown_scalars
from sonde.schema.names import is_setting
from sonde.schema.sketch import Array

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_MAX_SCALARS: Final = 12


@dataclass(frozen=True, slots=True)
class ScalarLine:
    name: str
    line: str
    first: float
    last: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of a run: facts by name, scalars with sparklines, warnings."""

    title: str
    facts: tuple[tuple[str, str], ...]
    scalars: tuple[ScalarLine, ...]
    num_more_scalars: int
    warnings: tuple[str, ...]


def scalar_lines(scalars: pa.Table, width: int = 24) -> tuple[ScalarLine, ...]:
    """One line per scalar, ordered by name."""
    lines = []
    logged = by_series(scalars, ("name",))
    for name in shown_scalars(logged):
        values = logged[name][1]
        if len(values) == 1 and is_setting(name):
            continue  # a constant, which is part of the structure
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (np.nan, np.nan)
        lines.append(ScalarLine(name, spark(values, width), float(values[0]), float(values[-1]), low, high))
    return tuple(lines)


def spark(values: Array, width: int) -> str:
    """A series as a sparkline; an interval with a non-finite value is a cross.

    >>> spark(np.array([0.0, 1.0, np.nan]), 3)
    '▁█×'
    """
    pieces = np.array_split(np.asarray(values, np.float64), min(width, len(values))) if len(values) else []
    heights = np.array([piece.mean() if np.isfinite(piece).all() else np.nan for piece in pieces])
    finite = heights[np.isfinite(heights)]
    if not len(finite):
        return "×" * len(heights)
    low, span = finite.min(), max(finite.max() - finite.min(), np.finfo(np.float64).tiny)
    return "".join("×" if not np.isfinite(h) else _BLOCKS[min(int((h - low) / span * 8), 7)] for h in heights)


def summarize(title: str, facts: list[tuple[str, object]], scalars: pa.Table, warnings: list[str]) -> Summary:
    lines = scalar_lines(scalars)
    shown = tuple((name, visible(value)) for name, value in facts if value not in ("", None, ()))
    return Summary(visible(title), shown, lines[:_MAX_SCALARS], max(0, len(lines) - _MAX_SCALARS), tuple(warnings))


def as_rich(summary: Summary) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    for name, value in summary.facts:
        facts.add_row(Text(name, style="dim"), Text(value))
    parts: list[Any] = [Text(summary.title, style="bold"), facts]
    if summary.scalars:
        scalars = Table(box=None, padding=(0, 2), header_style="dim")
        for column in ("scalar", "", "first", "last", "lowest", "highest"):
            scalars.add_column(column, justify="left" if column in ("scalar", "") else "right")
        for row in summary.scalars:
            numbers = [Text(f"{number:.4g}") for number in (row.first, row.last, row.low, row.high)]
            scalars.add_row(Text(visible(row.name)), Text(row.line, style="cyan"), *numbers)
        parts.append(scalars)
    if summary.num_more_scalars:
        parts.append(
            Text(
                f"and {summary.num_more_scalars} more {'scalar' if summary.num_more_scalars == 1 else 'scalars'}",
                style="dim",
            )
        )
    parts += [Text(f"! {visible(warning)}", style="yellow") for warning in summary.warnings]
    return Group(*parts)
