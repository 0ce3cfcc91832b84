"""What is left of the loss: beside where it began, and beside what guessing without looking at the input would give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.progress import loss_name, smoothed
from sonde.schema.sketch import Array
from sonde.schema.window import Window

MIN_STEPS: Final = 20
ALIKE: Final = 1.5
"""Two losses whose ratio stays within this are the same, but for a factor."""


@dataclass(frozen=True, slots=True)
class Learned:
    """Levels of the training loss. Losses that begin at zero or below have no share left: it is NaN."""

    name: str
    steps: NDArray[np.int64]
    values: Array
    """As logged, NaN and all."""
    first: float
    """The first value of all: it was seen before any update."""
    end: float
    """Median of the last tenth (at least five values); infinite when those are not finite."""
    best: float
    """Lowest level of the smoothed loss."""
    peak: float
    """The largest finite value after the first step."""
    guessing: float
    """Loss of the best constant answer, in units of the logged loss; NaN when it is not known."""

    @property
    def unit(self) -> float:
        """What counts as not having learned: the loss at the start, or that of guessing if it is lower."""
        return float(np.fmin(self.first, self.guessing)) if self.first > 0 else np.nan

    @property
    def left(self) -> float:
        """Share of the loss that is left at the end: 1 is nothing learned, above 1: worse than that."""
        return self.end / self.unit

    @property
    def best_left(self) -> float:
        return self.best / self.unit

    @property
    def has_diverged(self) -> bool:
        """Not finite in the end."""
        return not np.isfinite(self.end)


def learned(window: Window) -> Learned | None:
    """What is left of the training loss; None without a loss, or with too few steps to tell."""
    if "learned" not in window.notes:
        window.notes["learned"] = _learned(window)
    known: Learned | None = window.notes["learned"]
    return known


def _learned(window: Window) -> Learned | None:
    name = loss_name(window)
    if name is None:
        return None
    steps, values = window.get(name)
    finite = np.isfinite(values)
    if not len(values) or not finite[0] or (len(values) < MIN_STEPS and finite.all()):
        return None
    tail = values[-max(5, len(values) // 10) :]
    level = smoothed(values[finite], max(3, len(values) // 20))
    first = float(values[0])
    return Learned(
        name,
        steps,
        values,
        first=first,
        end=float(np.median(tail)) if np.isfinite(tail).sum() * 2 > len(tail) else np.inf,
        best=float(level.min()),
        peak=float(values[1:][finite[1:]].max(initial=-np.inf)),
        guessing=_guessing(window, name),
    )


def _guessing(window: Window, name: str) -> float:
    """The baseline is measured where the loss function is called; what is logged may be a multiple of that."""
    _, baseline = window.get("data/loss/baseline")
    kinds = window.get("data/loss/reduction")[1]
    known = baseline[np.isfinite(baseline)]
    if not len(known) or (len(kinds) and kinds[-1] not in (0, -1)):
        return np.nan
    scale = 1.0
    seen_steps, seen = window.get("data/loss/value")
    if name != "data/loss/value" and len(seen):
        steps, values = window.get(name)
        _, mine, theirs = np.intersect1d(steps, seen_steps, return_indices=True)
        a, b = values[mine], seen[theirs]
        usable = np.isfinite(a) & np.isfinite(b) & (b > 0)
        if not usable.any():
            return np.nan
        ratios = a[usable] / b[usable]
        # A penalty on the weights is added to what is logged; what it ends at is nearer to the bare loss.
        scale = float(np.median(ratios[len(ratios) // 2 :]))
        at_first = float(np.median(ratios[: max(len(ratios) // 5, 1)]))
        if not (1 / ALIKE < scale / at_first < ALIKE or (a[usable] >= b[usable]).all()):
            return np.nan  # neither a multiple of it nor a sum with it: another loss, of which this one is a part
    # Targets that are all the same, as a discriminator's, can be guessed without loss: nothing to compare with.
    return float(known[-1]) * scale if known[-1] > 0 else np.nan
