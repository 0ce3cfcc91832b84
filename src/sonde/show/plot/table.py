"""`table.plot()`: a matplotlib figure of the series in a table, one line each."""

from __future__ import annotations

from typing import Any

import numpy as np

from sonde.errors import UsageError
from sonde.run import Table
from sonde.schema.thinning import min_max
from sonde.show.long_table import LongTable
from sonde.show.plot.lines import MAX_LINES, SIZE, draw_lines, new_figure
from sonde.show.plot.series import POINTS, Series
from sonde.show.plot.style import RC, label, require_matplotlib


def plot_table(
    table: Table, *, log: bool | None = None, title: str | None = None, size: tuple[float, float] | None = None
) -> Any:
    """Draw the figure. Of more than twelve series, twelve are drawn, spread over the table; the title says so."""
    require_matplotlib()
    from matplotlib import rc_context

    found = LongTable(table)
    if not len(found):
        raise UsageError(_why_not(table))
    shown = np.unique(np.linspace(0, len(found) - 1, min(len(found), MAX_LINES)).round().astype(int)).tolist()
    note = "" if len(shown) == len(found) else f"{len(shown)} of {len(found)} series"
    with rc_context(RC):
        figure, axes = new_figure(size or SIZE)
        draw_lines(axes, [_series(found, number) for number in shown], log=log)
        axes.set_title(label(", ".join(filter(None, (title, note))), 80))
    return figure


def _series(found: LongTable, number: int) -> Series:
    steps, values = found.series(number)
    kept = min_max(steps, values, POINTS)
    return Series(found.names[number], steps[kept], values[kept], steps[~np.isfinite(values)])


def _why_not(table: Table) -> str:
    if not table.num_rows:
        return "nothing to plot: the table has no rows."
    columns = ", ".join(table.column_names)
    return (
        f"nothing to plot: this needs a column `step` and a column of numbers, and the table has {columns}. "
        "Draw other columns with  table.to_pandas().plot(...)"
    )
