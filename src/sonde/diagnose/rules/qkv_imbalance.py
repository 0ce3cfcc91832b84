"""Queries, keys and values of an attention layer learn at widely different rates: one is stuck or runs away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Projections, projections, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import listed, number, since
from sonde.schema.window import Window

TWINS_APART: Final = 30.0
"""Queries and keys mirror each other in gradients and updates; a healthy ratio is between 1 and 3."""
MOVES_APART: Final = 100.0
"""Largest relative update divided by the smallest, with an optimizer like Adam; healthy up to 4."""
MOVES_APART_PLAIN: Final = 2000.0
"""The same with plain gradient descent, where updates differ as much as gradients."""
NEVER: Final = np.inf
"""With small initial weights, the values' gradient is 100 times that of the queries: only a zero gradient counts."""
EARLY: Final = slice(1, 11)
MIN_STEPS: Final = 20


@dataclass(frozen=True, slots=True)
class Apart:
    """The largest imbalance of one layer."""

    layer: Projections
    series: str
    high: str
    low: str
    ratio: float
    excess: float
    """Ratio divided by its limit."""
    step: int


@rule(
    severity="warning",
    needs=("grad/*/rms", "update/*/ratio"),
    causes=("underfitting",),
    references=("DEForm, operators QZQ, QZK, QZV", "Noci et al. 2022, signal propagation in transformers"),
)
def qkv_imbalance(window: Window) -> Iterator[Found]:
    """Query, key and value projections learn at widely different rates."""
    layers = projections(window)
    widest = [apart for layer in layers if (apart := _widest(window, layer)) is not None]
    if not widest or 2 * len(widest) < len(layers):
        return
    worst = max(widest, key=lambda apart: apart.excess)
    is_slow = worst.series != "grad/*/rms"
    what = "relative update" if is_slow else "gradient"
    message = (
        f"The {what} of {worst.high} has been {number(worst.ratio)} times that of {worst.low} {since(worst.step)}."
        if worst.ratio < 1e12
        else f"The {what} of {worst.low} has been zero {since(worst.step)}, unlike that of {worst.high}."
    )
    yield Found(
        message,
        step=worst.step,
        confidence=0.75,
        sites=[worst.high, worst.low],
        evidence=[
            Evidence(
                worst.series.replace("*", worst.high),
                worst.ratio,
                "below 10",
                worst.step,
                f"{what} / that of {worst.low}",
            )
        ],
        remedy=("Put them into one parameter group with one learning rate, and initialise" if is_slow else "Initialise")
        + f" them alike: `nn.init.normal_(w, 0, 0.02)` for {listed(worst.layer.names)}. Do not freeze any of them or "
        "give one a separate learning rate.",
    )


def _widest(window: Window, layer: Projections) -> Apart | None:
    is_adaptive = "SGD" not in structure(window).optimizer_type
    moves = MOVES_APART if is_adaptive else MOVES_APART_PLAIN
    twins = (layer.query, layer.key)
    found = [
        # Late in a run with another fault, only one gradient may be left; at the start that never happens.
        *_gaps(window, layer, "grad/*/rms", twins, TWINS_APART, is_late=False),
        *_gaps(window, layer, "grad/*/rms", layer.names, NEVER, is_late=False),
        *_gaps(window, layer, "update/*/ratio", twins, TWINS_APART),
        *_gaps(window, layer, "update/*/ratio", layer.names, moves),
    ]
    return max(found, key=lambda apart: apart.excess, default=None)


def _gaps(
    window: Window, layer: Projections, series: str, names: tuple[str, ...], limit: float, *, is_late: bool = True
) -> Iterator[Apart]:
    """Imbalances early and late in the run whose ratio exceeds a limit; a zero value exceeds any limit."""
    columns = {name: window.get(series.replace("*", name)) for name in names}
    columns = {name: column for name, column in columns.items() if len(column[0]) >= MIN_STEPS}
    if len(columns) < 2:
        return
    half = max(10, min(len(steps) for steps, _ in columns.values()) // 2)
    for part in (EARLY, slice(-half, None)) if is_late else (EARLY,):
        level = {name: _median(values[part]) for name, (_, values) in columns.items()}
        high, low = max(level, key=lambda n: level[n]), min(level, key=lambda n: level[n])
        if not np.isfinite(level[high]) or not level[high] > 0:
            continue
        ratio = level[high] / level[low] if level[low] > 0 else 1e12
        if ratio > limit or level[low] == 0:
            yield Apart(layer, series, high, low, ratio, ratio / min(limit, 1e6), int(columns[high][0][part][0]))


def _median(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else np.nan
