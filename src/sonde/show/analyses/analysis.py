"""The result of an analysis as plain data: a verdict in words, its numbers, and the series to draw."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sonde.schema.thinning import min_max

Tone = Literal["good", "watch", "bad", "unknown"]
Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Curve = tuple[list[int], list[float]]
"""Steps and values as plain lists."""

POINTS: Final = 300
"""Number of buckets of a line in a report; each keeps its minimum and maximum."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and what it means."""

    name: str
    value: float | None
    """None if it could not be computed."""
    meaning: str
    is_step: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; x is a step, or an index into `Chart.places`."""

    name: str
    x: Steps
    y: Floats

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "x": self.x.tolist(), "y": self.y.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A line chart over steps, or along the depth of the model if `places` names its layers."""

    title: str
    lines: tuple[Line, ...]
    places: tuple[str, ...] = ()
    is_log: bool = False
    marks: tuple[tuple[int, str], ...] = ()
    """Steps to mark with a vertical line, and their labels."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "lines": [line.as_dict() for line in self.lines],
            "places": list(self.places),
            "is_log": self.is_log,
            "marks": [list(mark) for mark in self.marks],
        }


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text and numbers, most important first."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    drawn: str = ""
    """The column that a page draws as bars."""

    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "columns": list(self.columns), "rows": [list(row) for row in self.rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """One of the standard analyses."""

    key: str
    title: str
    tone: Tone
    verdict: str
    """The conclusion, in a sentence or two."""
    quantities: tuple[Quantity, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "key": self.key,
            "title": self.title,
            "tone": self.tone,
            "verdict": self.verdict,
            "quantities": [quantity.as_dict() for quantity in self.quantities],
            "charts": [chart.as_dict() for chart in self.charts],
            "tables": [table.as_dict() for table in self.tables],
        }

    @property
    def facts(self) -> dict[str, float]:
        """The quantities that could be computed, by name."""
        return {one.name: one.value for one in self.quantities if one.value is not None}

    @property
    def rows(self) -> list[dict[str, str | float]]:
        """The rows of the first table, as dicts."""
        return [dict(zip(table.columns, row, strict=True)) for table in self.tables[:1] for row in table.rows]

    @property
    def curves(self) -> dict[str, Curve]:
        """The lines of the first chart, if it is over steps."""
        lines = [line for chart in self.charts[:1] if not chart.places for line in chart.lines]
        return {line.name: (line.x.tolist(), line.y.tolist()) for line in lines}

    def __getitem__(self, name: str) -> float | None:
        return next(quantity.value for quantity in self.quantities if quantity.name == name)


def known(value: float) -> float | None:
    """The value, or None if it is NaN or infinite."""
    return float(value) if np.isfinite(value) else None


def line(name: str, x: Steps, y: Floats, points: int = POINTS) -> Line:
    """A line, downsampled so that every spike and NaN remains."""
    kept = min_max(x, y, points)
    return Line(name, x[kept], y[kept])
