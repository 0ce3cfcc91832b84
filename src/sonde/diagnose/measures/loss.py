"""The training and the validation loss: their names, what is left of them compared with guessing, and their jumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.curves import smoothed
from sonde.schema.losses import SEEN, training_loss, validation_accuracy, validation_loss
from sonde.schema.names import parse_series
from sonde.schema.sketch import Array
from sonde.schema.window import Column, Window, noted

MIN_STEPS: Final = 20
ALIKE: Final = 1.5
"""Two losses whose ratio stays within this are the same, but for a factor."""
MIN_POINTS: Final = 3
MANY_POINTS: Final = 18
BACK: Final = 20
"""Steps that make up the recent range."""
MIN_BACK: Final = 8
SKIP: Final = 10
"""The first steps are no measure of what is usual."""
APART: Final = 5
"""Jumps closer together than this are one."""
_SEEN: Final = {name: parse_series(name) for name in SEEN}


def loss_name(window: Window) -> str | None:
    """The training loss: logged by the user, else seen by sonde."""
    return training_loss(_names(window))


def validation_name(window: Window) -> str | None:
    """The validation loss: logged by the user, else seen by sonde."""
    return validation_loss(_names(window))


def validation(window: Window, what: str = "loss") -> Column:
    """The validation loss, or accuracy (`what="acc"`); empty when there is none."""
    name = validation_name(window) if what == "loss" else validation_accuracy(_names(window))
    return window.get(name or "")


def _names(window: Window) -> list[str]:
    """Scalars with at least one value; what sonde saw itself is stored among the series."""
    logged = [name for name, (steps, _) in window.scalars.items() if len(steps)]
    return [*logged, *(name for name, series in _SEEN.items() if len(window.series.get(series, ((),))[0]))]


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


@noted
def learned(window: Window) -> Learned | None:
    """What is left of the training loss; None without a loss, or with too few steps to tell."""
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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Levels of the validation loss, in its own units, which are those of the training loss."""

    steps: NDArray[np.int64]
    values: Array
    best: float
    best_step: int
    end: float
    """Median of the last sixth of the points; of few points, the lower of the last two."""
    train: float
    """Level of the training loss at the end."""
    guessing: float
    """Loss of the best constant answer; NaN when it is not known."""
    accuracy: float
    """Typical accuracy on held-out data, once half of the run is over; NaN when none was logged."""

    @property
    def gap(self) -> float:
        """Validation over training loss, at the end."""
        return self.end / self.train if self.train > 0 else np.inf

    @property
    def turn(self) -> float:
        """How far the validation loss has risen from its best."""
        return self.end / self.best if self.best > 0 else np.nan


@noted
def held_out(window: Window) -> HeldOut | None:
    """What validation says; None without at least three values, or where the losses cannot be compared."""
    steps, values = validation(window)
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    state = learned(window)
    if len(values) < MIN_POINTS or state is None or state.has_diverged or not state.first > 0:
        return None
    # Sums over sets of different sizes are not to be compared.
    reduction = window.get("data/loss/reduction")[1]
    if len(reduction) and reduction[-1] == 1:
        return None
    accuracy = validation(window, "acc")[1]
    best = int(np.argmin(values))
    return HeldOut(
        steps,
        values,
        best=float(values[best]),
        best_step=int(steps[best]),
        end=float(np.median(values[-(len(values) // 6) :]) if len(values) >= MANY_POINTS else values[-2:].min()),
        train=state.end,
        guessing=state.guessing,
        accuracy=float(np.median(accuracy[len(accuracy) // 2 :])) if np.isfinite(accuracy).any() else np.nan,
    )


@dataclass(frozen=True, slots=True)
class Spike:
    """One jump of the loss."""

    index: int
    """Its place among the values of the loss."""
    step: int
    height: float
    """The value over the recent median."""


def find_spikes(loss: Learned, *, spreads: float = 8.0, times: float = 2.0, share: float = 0.2) -> list[Spike]:
    """Values above the recent median by many times the recent spread, by a factor, and by a share of the starting loss.

    All three, because each alone happens in healthy runs: small batches have wide spreads, losses near zero double.
    """
    found: list[Spike] = []
    last = -APART - 1
    for index in _candidates(loss.values, times, share * loss.unit):
        recent = loss.values[max(0, index - BACK) : index]
        recent = recent[np.isfinite(recent)]
        if len(recent) < MIN_BACK:
            continue
        level, value = float(np.median(recent)), float(loss.values[index])
        is_jump = value - level > max(spreads * _spread(recent), share * loss.unit) and value > times * level
        if is_jump and index - last > APART:
            found.append(Spike(index, int(loss.steps[index]), value / max(level, 1e-30)))
        if is_jump:
            last = index
    return found


def _candidates(values: Array, times: float, gap: float) -> list[int]:
    """Where a jump is possible at all. A median is at least the minimum, and the minimum is cheap: medians of every
    step would be most of the cost of all rules together."""
    if len(values) <= SKIP:
        return []
    padded = np.concatenate([np.full(BACK, np.inf), np.where(np.isfinite(values), values, np.inf)])
    low = np.lib.stride_tricks.sliding_window_view(padded, BACK).min(axis=-1)[: len(values)]
    with np.errstate(invalid="ignore"):
        is_above = np.isfinite(values) & np.isfinite(low) & (values - low > gap) & (values > times * low)
    return [int(index) for index in np.flatnonzero(is_above[SKIP:]) + SKIP]


def _spread(values: Array) -> float:
    low, high = np.quantile(values, (0.1, 0.9))
    return float(high - low)
