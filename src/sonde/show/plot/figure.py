"""`run.plot("grad/*/rms")`: a matplotlib figure of series, as lines for a few and as a heatmap for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from sonde.errors import UnknownNameError, UsageError
from sonde.run import Run, Steps
from sonde.schema.names import matches
from sonde.schema.old_names import current_stat
from sonde.show.plot.axes import spans_decades
from sonde.show.plot.lines import MAX_LINES, SIZE, draw_lines, new_figure
from sonde.show.plot.series import is_stat, read_series
from sonde.show.plot.style import MISSING, ODD, RC, label, require_matplotlib
from sonde.show.plot.tensors import draw_evolution, draw_spectra
from sonde.show.pooled import Pooled, pool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = Literal["auto", "lines", "heatmap", "evolution", "spectra"]
STYLES: Final[tuple[Style, ...]] = get_args(Style)
Size = tuple[float, float] | str | None
COLUMNS: Final = 600
MAX_LABELS: Final = 40
MAX_NAME: Final = 36


def plot(
    run: Run,
    pattern: str | Sequence[str],
    *,
    steps: Steps = None,
    style: Style = "auto",
    log: bool | None = None,
    title: str | None = None,
    size: Size = None,
) -> Figure:
    """Draw the figure; `savefig("x.svg")` writes it, a notebook shows it."""
    size = _inches(size)
    require_matplotlib()
    if style not in STYLES:
        raise UnknownNameError("style", style, STYLES)
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    if not patterns:
        raise UsageError('nothing to plot. Give a pattern, e.g.  run.plot("grad/*/rms")  or  run.plot("loss")')
    if style in ("evolution", "spectra"):
        draw = draw_evolution if style == "evolution" else draw_spectra
        return draw(run, patterns, steps, log, _title(run) if title is None else title, size)
    if style == "heatmap" or (style == "auto" and _are_many(run, patterns)):
        return _heatmap(run, patterns, steps, log, title, size)
    return _lines(run, patterns, steps, log, title, size)


def _inches(size: Size) -> tuple[float, float] | None:
    """Width and height, given as numbers or as "6.4x3.2"."""
    if size is None:
        return None
    try:
        width, height = (float(part) for part in (size.lower().split("x") if isinstance(size, str) else size))
    except ValueError:
        width = height = 0.0
    if not (0 < width <= 100 and 0 < height <= 100):
        raise UsageError(f'invalid size "{size}": give width x height in inches, e.g. 6.4x3.2.')
    return width, height


def _are_many(run: Run, patterns: Sequence[str]) -> bool:
    """Whether the single pattern matches more sites than lines can show."""
    if len(patterns) != 1 or not is_stat(run, patterns[0]) or any(sign in patterns[0].split("/")[2] for sign in "*?["):
        return False
    kind, site, _ = patterns[0].split("/")
    table = run.sites()
    names = zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True)
    return sum(matches(kind, own) and matches(site, name) for own, name in names) > MAX_LINES


def _lines(run: Run, patterns: Sequence[str], steps: Any, log: bool | None, title: Any, size: Any) -> Figure:
    from matplotlib import rc_context

    series = read_series(run, patterns, steps)
    with rc_context(RC):
        figure, axes = new_figure(size or SIZE)
        draw_lines(axes, series, log=log)
        axes.set_title(_title(run) if title is None else title)
    return figure


def _heatmap(run: Run, patterns: Sequence[str], steps: Any, log: bool | None, title: Any, size: Any) -> Figure:
    from matplotlib import rc_context

    if len(patterns) != 1 or not is_stat(run, patterns[0]):
        raise UsageError(
            'a heatmap shows one stat of many sites, e.g.  run.plot("grad/*/rms", style="heatmap"); '
            f"got {', '.join(patterns)}."
        )
    stat = current_stat(patterns[0].split("/")[2])
    if any(sign in stat for sign in "*?["):
        raise UsageError(f'a heatmap shows one stat, and "{stat}" may match several. Give a single name, e.g. rms.')
    pooled = pool(run, patterns[0], width=COLUMNS, steps=steps)
    if not pooled.sites:
        raise UsageError(f"nothing in {run.project}/{run.name} matches {patterns[0]}. `run.sites()` lists the sites.")
    kinds = sorted({site.partition("/")[0] for site in pooled.sites})
    with rc_context(RC):
        figure, axes = new_figure(size or (SIZE[0], min(max(1.2 + 0.14 * len(pooled.sites), SIZE[1]), 7.5)))
        _draw_heat(figure, axes, pooled, f"{' '.join(kinds)} {stat}", log=log)
        axes.set_title(_title(run) if title is None else title)
    return figure


def _title(run: Run) -> str:
    return label(f"{run.project}/{run.name}", 80)


def _draw_heat(figure: Figure, axes: Axes, pooled: Pooled, quantity: str, *, log: bool | None) -> None:
    """Draw the heatmap, its colour scale, and a note on the two special colours."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    is_log = spans_decades([pooled.values.ravel()]) if log is None else log
    values = np.where(pooled.values > 0, pooled.values, np.nan) if is_log else pooled.values
    num_sites, num_columns = values.shape
    last = pooled.first_step + num_columns * pooled.steps_per_column
    extent = (pooled.first_step - 0.5, last - 0.5, num_sites - 0.5, -0.5)
    colours = colormaps["viridis"].with_extremes(bad=MISSING)
    style: dict[str, Any] = {"extent": extent, "aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, norm=_norm(values, is_log), **style)
    is_odd = np.ma.masked_equal(pooled.is_odd.astype(float), 0.0)
    axes.imshow(is_odd, cmap=ListedColormap([ODD]), vmin=0, vmax=1, **style)
    figure.colorbar(image, ax=axes, pad=0.02, label=quantity)
    axes.set_xlabel(_xlabel(pooled, values))
    _label_sites(axes, pooled.sites)


def _norm(values: Any, is_log: bool) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.1, 1.0)
    if low == high:
        low, high = (low / 2, high * 2) if is_log else (low - 0.5, high + 0.5)
    return LogNorm(low, high) if is_log else Normalize(low, high)


def _xlabel(pooled: Pooled, values: Any) -> str:
    notes = []
    if pooled.is_odd.any():
        notes.append("red: NaN or infinite")
    if (~np.isfinite(values) & ~pooled.is_odd).any():
        notes.append("grey: nothing recorded")
    return f"step   ({', '.join(notes)})" if notes else "step"


def _label_sites(axes: Axes, sites: tuple[str, ...]) -> None:
    kinds = {site.partition("/")[0] for site in sites}
    names = [site if len(kinds) > 1 else site.partition("/")[2] for site in sites]
    every = max(1, -(-len(names) // MAX_LABELS))
    shown = range(0, len(names), every)
    axes.set_yticks(list(shown), [label(names[row], MAX_NAME) for row in shown], fontsize=7 if len(names) > 15 else 8)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
