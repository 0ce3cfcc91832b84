"""Many series as a picture: sites down, steps across, the largest value of each stretch as colour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sonde.show.plot.axes import spans_decades
from sonde.show.plot.style import MISSING, ODD, label
from sonde.show.pooled import Pooled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS: Final = 600
MAX_LABELS: Final = 40
MAX_NAME: Final = 36


def draw_heat(figure: Figure, axes: Axes, pooled: Pooled, quantity: str, *, log: bool | None) -> None:
    """The picture, its scale, and what the two special colours mean."""
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
