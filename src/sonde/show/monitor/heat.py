"""The heatmap as lines of text: sites are folded into rows and steps into columns, keeping every extreme visible."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from sonde.show.monitor.words import fitted
from sonde.show.plot.axes import spans_decades
from sonde.show.pooled import Pooled
from sonde.show.term.number import number

MIN_LABEL: Final = 8
MAX_LABEL: Final = 26
# Viridis at nine points, as published with matplotlib: even in brightness and safe for the colour-blind.
_ANCHORS: Final = np.array(
    [
        (68, 1, 84),
        (71, 44, 122),
        (59, 81, 139),
        (44, 113, 142),
        (33, 144, 141),
        (39, 173, 129),
        (92, 200, 99),
        (170, 220, 50),
        (253, 231, 37),
    ],
    np.float64,
)
SHADES: Final = " ░▒▓█"
ASCII_SHADES: Final = " .:=#"
NUM_LEVELS: Final = 32
ODD: Final = "×"


def _palette() -> list[str]:
    """`NUM_LEVELS` colours as #rrggbb, dark to bright."""
    places = np.linspace(0, len(_ANCHORS) - 1, NUM_LEVELS)
    channels = [np.interp(places, np.arange(len(_ANCHORS)), _ANCHORS[:, channel]) for channel in range(3)]
    return [f"#{int(r):02x}{int(g):02x}{int(b):02x}" for r, g, b in zip(*channels, strict=True)]


_PALETTE: Final = _palette()


@dataclass(frozen=True, slots=True)
class HeatLook:
    """The available space and the capabilities of the terminal."""

    width: int
    height: int
    has_colours: bool = True
    """Whether the terminal has 256 colours or more; otherwise shades replace colours."""
    ascii: bool = False


def heat_lines(pooled: Pooled, look: HeatLook) -> list[Text]:
    """At most `look.height` lines: the map, with the steps and the scale below it."""
    label_width = min(max(look.width // 4, MIN_LABEL), MAX_LABEL)
    num_columns = max(look.width - label_width - 1, 4)
    num_rows = max(look.height - 1, 1)
    folded, names = fold(pooled, num_rows, num_columns)
    bounds, is_log = _scale(pooled)
    codes, is_odd = levels(folded.values, bounds, is_log=is_log), folded.is_odd
    lines = []
    for row, name in enumerate(names):
        text = Text(f"{fitted(name, label_width):>{label_width}} ", style="dim")
        _cells(text, codes[row], is_odd[row], look)
        lines.append(text)
    lines.append(_legend(pooled, label_width, codes.shape[1], bounds, is_log))
    return lines


def fold(pooled: Pooled, num_rows: int, num_columns: int) -> tuple[Pooled, list[str]]:
    """The maximum of each group of neighbouring sites and steps, and a label for each group of sites."""
    rows = _edges(len(pooled.sites), num_rows)
    columns = _edges(pooled.cells.shape[1], num_columns)
    cells = np.maximum.reduceat(np.maximum.reduceat(pooled.cells, rows, axis=0), columns, axis=1)
    cells = np.repeat(cells, max(num_columns // max(len(columns), 1), 1), axis=1)  # a short run also fills the width
    ends = [*rows[1:].tolist(), len(pooled.sites)]
    names = [_name(pooled.sites[start].partition("/")[2], end - start) for start, end in zip(rows, ends, strict=True)]
    return replace(pooled, cells=cells), names


def _edges(length: int, parts: int) -> np.ndarray:
    return np.unique(np.linspace(0, length, min(parts, length) + 1).astype(np.intp)[:-1])


def _name(first: str, num_sites: int) -> str:
    return first if num_sites == 1 else f"{first} +{num_sites - 1}"


def _cells(text: Text, codes: np.ndarray, is_odd: np.ndarray, look: HeatLook) -> None:
    """Merge neighbouring cells of the same style into one span, which keeps a wide map cheap."""
    shades = ASCII_SHADES if look.ascii else SHADES
    start = 0
    keys = np.where(is_odd, NUM_LEVELS, codes)
    for end in range(1, len(keys) + 1):
        if end < len(keys) and keys[end] == keys[start]:
            continue
        key, count = int(keys[start]), end - start
        if key == NUM_LEVELS:
            text.append(
                ("x" if look.ascii else ODD) * count, style="bold white on red" if look.has_colours else "bold red"
            )
        elif key < 0:
            text.append(" " * count)
        elif look.has_colours:
            text.append(" " * count, style=f"on {_PALETTE[key]}")
        else:
            text.append(shades[1 + key * (len(shades) - 1) // NUM_LEVELS] * count)
        start = end


def _scale(pooled: Pooled) -> tuple[tuple[float, float], bool]:
    positive = pooled.values[np.isfinite(pooled.values) & (pooled.values > 0)]
    if positive.size and spans_decades([pooled.values.ravel()]):
        return (float(positive.min()), float(positive.max())), True
    low, high = pooled.bounds
    return (low, high), False


def _legend(pooled: Pooled, label_width: int, width: int, bounds: tuple[float, float], is_log: bool) -> Text:
    last = int(pooled.column_step(pooled.values.shape[1]) - 1)
    scale = f"{number(bounds[0])} to {number(bounds[1])}{' log' if is_log else ''}"
    left, right = f"step {pooled.first_step:,}", f"{max(last, pooled.first_step):,}"
    room = width - len(left) - len(right)
    middle = scale.center(room) if room > len(scale) + 1 else " " * max(room, 1)
    return Text(f"{' ' * label_width} {left}{middle}{right}", style="dim")


def levels(values: NDArray[np.float64], bounds: tuple[float, float], *, is_log: bool) -> NDArray[np.int64]:
    """The level of each value, below `NUM_LEVELS`; -1 for missing values, the lowest for zero on a log scale."""
    low, high = bounds
    shown = np.array(values)
    known = np.isfinite(shown)
    if is_log:
        shown = np.log10(np.where(shown > 0, shown, low))
        low, high = np.log10(low), np.log10(high)
    span = high - low
    share = (shown - low) / span if span > 0 else np.full(shown.shape, 0.5)
    share = np.where(known, np.nan_to_num(share), 0.0)
    return np.where(known, np.clip(share * NUM_LEVELS, 0, NUM_LEVELS - 1).astype(np.int64), -1)
