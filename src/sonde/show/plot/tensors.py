"""Figures of whole tensors over the snapshots of a run: their evolution, and the singular values of matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sonde.errors import UsageError
from sonde.run import Run, Table
from sonde.schema.names import matches_any
from sonde.show.plot.axes import spans_decades
from sonde.show.plot.lines import MAX_LINES, SIZE, draw_lines, new_figure
from sonde.show.plot.series import Series
from sonde.show.plot.style import RC, colour, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SPECTRA: Final = 6
"""Maximum number of tensors whose spectra fit on a page, one chart each."""
PANELS: Final = {"norm": "norm", "from_first": "distance from first", "cosine_first": "cosine to first"}
MEDIAN: Final = 4
BANDS: Final = {"25-75 %": (3, 5), "5-95 %": (2, 6), "0-100 %": (0, 8)}
"""Pairs of the nine quantiles in `run.tensors.distribution`, by their place."""

Rows = Sequence[Mapping[str, Any]]


def draw_evolution(run: Run, patterns: Sequence[str], steps: Any, log: bool | None, title: str, size: Any) -> Figure:
    """Norm, distance from the first snapshot, cosine to it, and quantiles: a chart each, a line for each tensor."""
    from matplotlib import rc_context

    _require_few(run, patterns, MAX_LINES, axes=0)
    spread = _by_tensor(run.tensors.distribution(patterns, steps=steps))
    moved = _by_tensor(run.tensors.evolution(patterns, steps=steps))
    found = {  # both count non-finite values; evolution counts all of them, not those of a sample
        name: [{**values, **row} for values, row in zip(spread[name], rows, strict=True)]
        for name, rows in moved.items()
    }
    with rc_context(RC):
        figure, grid = new_figure(size or (SIZE[0], 2 * SIZE[1]), nrows=len(PANELS) + 1, sharex=True)
        for panel, (column, quantity) in zip(grid, PANELS.items(), strict=False):
            series = [_series(name, rows, [_known(row, column) for row in rows]) for name, rows in found.items()]
            draw_lines(panel, series, log=False if column == "cosine_first" else log)
            panel.set_ylabel(quantity)
        _draw_quantiles(grid[-1], found)
        for panel in grid:
            panel.label_outer()
        for panel in grid[1 : len(PANELS) + (len(found) > 1)]:  # the first chart names the tensors of all
            if panel.get_legend() is not None:
                panel.get_legend().remove()
        grid[0].set_title(_title(title, next(iter(found)) if len(found) == 1 else ""))
    return figure


def draw_spectra(run: Run, patterns: Sequence[str], steps: Any, log: bool | None, title: str, size: Any) -> Figure:
    """Singular values by their index: a chart for each matrix, a line for each snapshot, coloured by its step."""
    from matplotlib import colormaps, rc_context
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    _require_few(run, patterns, MAX_SPECTRA, axes=2)
    found = _by_tensor(run.tensors.spectra(patterns, steps=steps, k=None))
    if not found:
        raise UsageError(
            f"no spectrum to plot: {', '.join(patterns)} matches no tensor with two or more axes and finite values "
            "at these steps. Name a weight matrix, e.g. param/0.weight."
        )
    known = [row["step"] for rows in found.values() for row in rows]
    colours = ScalarMappable(Normalize(min(known), max(*known, min(known) + 1)), colormaps["viridis"])
    with rc_context(RC):
        figure, grid = new_figure(size or (SIZE[0], max(SIZE[1], 2.2 * len(found))), nrows=len(found), squeeze=False)
        for panel, rows in zip(grid[:, 0], found.values(), strict=True):
            _draw_spectrum(panel, rows, colours, log)
        for panel, name, before in zip(grid[:, 0], found, (title, *[""] * len(found)), strict=False):
            panel.set_title(_title(before, name))
        figure.colorbar(colours, ax=list(grid[:, 0]), pad=0.02, label="step", ticks=MaxNLocator(5, integer=True))
    return figure


def _require_few(run: Run, patterns: Sequence[str], most: int, *, axes: int) -> None:
    """Refuse patterns that match more tensors than a figure shows, before any is read."""
    store = run.tensors.store()
    entries = {name: entry for step in store.steps for name, entry in store.entries(step).items()}
    num = sum(len(entry.shape) >= axes and matches_any(patterns, name) for name, entry in entries.items())
    if num > most:
        raise UsageError(
            f"{', '.join(patterns)} matches {num} tensors, and this figure shows at most {most}. "
            "Select fewer, e.g. one layer: param/layers.0.*"
        )


def _by_tensor(table: Table) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        found.setdefault(f"{row['kind']}/{row['site']}", []).append(row)
    return found


def _series(name: str, rows: Rows, values: Sequence[float | None]) -> Series:
    steps = np.array([row["step"] for row in rows], np.int64)
    is_odd = np.array([bool(row["nonfinite"]) for row in rows])
    return Series(name, steps, np.array(values, np.float64), steps[is_odd])


def _known(row: Mapping[str, Any], column: str) -> float | None:
    """A number of a snapshot; None if no element is finite, whose norm would be drawn as 0."""
    return None if row["nonfinite"] == row["num_elements"] else row[column]


def _draw_quantiles(axes: Axes, values: Mapping[str, Rows]) -> None:
    """The median as a line, and bands around it; of several tensors only one band each, or nothing could be read."""
    spread = {name: np.array([row["quantiles"] or [np.nan] * 9 for row in rows]) for name, rows in values.items()}
    draw_lines(
        axes, [_series(name, rows, spread[name][:, MEDIAN].tolist()) for name, rows in values.items()], log=False
    )
    shown = BANDS if len(values) == 1 else {"5-95 %": BANDS["5-95 %"]}
    for number, (name, rows) in enumerate(values.items()):
        for band, (low, high) in shown.items():
            quantiles, steps = spread[name], [row["step"] for row in rows]
            axes.fill_between(
                steps, quantiles[:, low], quantiles[:, high], color=colour(number), alpha=0.18, linewidth=0, label=band
            )
    axes.set_ylabel("values" if len(values) == 1 else "median, 5-95 %")
    if len(values) == 1:
        axes.lines[0].set_label("median")
        axes.legend(loc="best", ncols=2)


def _draw_spectrum(axes: Axes, rows: Rows, colours: Any, log: bool | None) -> None:
    spectra = [np.array(row["singular_values"]) for row in rows]
    is_log = spans_decades(spectra) if log is None else log
    for row, values in zip(rows, spectra, strict=True):
        shown = np.where(values > 0, values, np.nan) if is_log else values
        axes.plot(np.arange(1, len(shown) + 1), shown, color=colours.to_rgba(row["step"]), label=f"step {row['step']}")
    if is_log:
        axes.set_yscale("log")
    sides = min(rows[0]["rows"], rows[0]["columns"])
    num = max(map(len, spectra))
    axes.set_xlabel("index" if num == sides else f"index   (the largest {num} of {sides:,})")
    axes.set_ylabel("singular value")
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)


def _title(title: str, name: str) -> str:
    return ", ".join(filter(None, (title, label(name))))
