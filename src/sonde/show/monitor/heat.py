"""The heatmap as lines of text: sites folded into the rows there are, steps into the columns; nothing folded hides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from rich.text import Text

from sonde.show.monitor.colours import ASCII_SHADES, NUM_LEVELS, ODD, SHADES, levels, palette
from sonde.show.monitor.words import fitted
from sonde.show.plot.axes import spans_decades
from sonde.show.pooled import Pooled
from sonde.show.term.number import number

MIN_LABEL: Final = 8
MAX_LABEL: Final = 26
_PALETTE: Final = palette()


@dataclass(frozen=True, slots=True)
class HeatLook:
    """How much room there is, and what the terminal can show."""

    width: int
    height: int
    has_colours: bool = True
    """256 colours or more; else shades stand for colours."""
    ascii: bool = False


def heat_lines(pooled: Pooled, look: HeatLook) -> list[Text]:
    """At most `look.height` lines: the picture, and below it the steps and the scale."""
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
    """The highest of each group of neighbouring sites and steps, and what to call each group of sites."""
    rows = _edges(len(pooled.sites), num_rows)
    columns = _edges(pooled.cells.shape[1], num_columns)
    cells = np.maximum.reduceat(np.maximum.reduceat(pooled.cells, rows, axis=0), columns, axis=1)
    cells = np.repeat(cells, max(num_columns // max(len(columns), 1), 1), axis=1)  # a short run fills the width too
    ends = [*rows[1:].tolist(), len(pooled.sites)]
    names = [_name(pooled.sites[start].partition("/")[2], end - start) for start, end in zip(rows, ends, strict=True)]
    return replace(pooled, cells=cells), names


def _edges(length: int, parts: int) -> np.ndarray:
    return np.unique(np.linspace(0, length, min(parts, length) + 1).astype(np.intp)[:-1])


def _name(first: str, num_sites: int) -> str:
    return first if num_sites == 1 else f"{first} +{num_sites - 1}"


def _cells(text: Text, codes: np.ndarray, is_odd: np.ndarray, look: HeatLook) -> None:
    """Neighbours of one look become one span, which keeps a wide map cheap."""
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
