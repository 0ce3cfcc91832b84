"""Lines over steps in one pair of axes, with crosses at the steps of non-finite values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sonde.show.plot.axes import short_names, spans_decades
from sonde.show.plot.series import Series
from sonde.show.plot.style import ODD, colour, dash

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LINES: Final = 12
"""Maximum number of lines that can be distinguished."""
SIZE: Final = (6.4, 3.2)


def new_figure(size: tuple[float, float], **grid: Any) -> tuple[Figure, Any]:
    from sonde.show.plot.picture import Picture

    figure = Picture(figsize=size, layout="constrained")
    return figure, figure.subplots(**grid)


def draw_lines(axes: Axes, series: Sequence[Series], *, log: bool | None) -> None:
    """Draw all series in one pair of axes."""
    names, shared = short_names([one.name for one in series])
    is_log = spans_decades(one.values for one in series) if log is None else log
    for number, (name, one) in enumerate(zip(names, series, strict=True)):
        values = np.where(np.isfinite(one.values), one.values, np.nan)
        if is_log:
            values = np.where(values > 0, values, np.nan)
        is_point = np.isfinite(values).sum() == 1
        axes.plot(
            one.steps, values, color=colour(number), linestyle=dash(number), label=name, marker="." if is_point else ""
        )
    if is_log:
        axes.set_yscale("log")
    _mark_odd(axes, series)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)  # steps are integers
    axes.set_xlabel("step")
    axes.set_ylabel(shared)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    if len(series) > 1 or any(len(one.odd_steps) for one in series):
        axes.legend(loc="best", ncols=1 if len(series) <= 8 else 2)


def _mark_odd(axes: Axes, series: Sequence[Series]) -> None:
    odd = np.unique(np.concatenate([np.empty(0, np.int64), *(one.odd_steps for one in series)]))
    if len(odd):
        # On the axis itself, regardless of the scale: a cross among the data would look like a value.
        axes.plot(
            odd,
            np.zeros(len(odd)),
            linestyle="none",
            marker="x",
            markersize=4,
            color=ODD,
            label="non-finite",
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )
