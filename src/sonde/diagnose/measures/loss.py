"""The training and the validation loss: their names, how far they have fallen, and their spikes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import held, smoothed
from sonde.diagnose.measures.events import happenings
from sonde.diagnose.wording import number, percent
from sonde.schema.losses import SEEN, SEEN_TRAINING, training_loss, validation_accuracy, validation_loss
from sonde.schema.names import parse_series
from sonde.schema.sketch import Array
from sonde.schema.window import Column, Window, noted

MIN_STEPS: Final = 20
MEAN, SUM, UNKNOWN = 0, 1, -1
"""Values of `data/loss/reduction`."""
ALIKE: Final = 1.5
"""Two losses whose ratio stays within this range are the same up to a factor."""
MIN_POINTS: Final = 3
MANY_POINTS: Final = 18
BACK: Final = 20
"""Number of steps that make up the recent range."""
MIN_BACK: Final = 8
SKIP: Final = 10
"""Number of first steps to ignore: they do not show what is usual."""
APART: Final = 5
"""Spikes at most this far apart, in steps, count as one."""
NEGLIGIBLE: Final = 1e-3
"""Fraction of the starting loss below which a loss counts as 0."""
SPARSE: Final = 2
"""A logged loss with fewer values than the measured one by this factor is a summary of it."""
_SEEN: Final = {name: parse_series(name) for name in SEEN}


def loss_name(window: Window) -> str | None:
    """Name of the training loss: the one logged by the user, else the one sonde measured.

    Trainers log every tenth or hundredth step, and some leave out NaN: then the measured one is the whole story.
    """
    name = training_loss(_names(window))
    steps, measured = window.get(SEEN_TRAINING)
    if name is None or not len(measured):
        return name
    logged = window.get(name)[1]
    # A loss that a scaler made too large is not the user's loss.
    skipped = [event.step for event in happenings(window, "skipped_step")]
    bad = steps[~np.isfinite(measured)]
    is_filtered = not np.isin(bad, skipped).all() and bool(np.isfinite(logged).all())
    return SEEN_TRAINING if len(measured) > SPARSE * len(logged) or is_filtered else name


def validation_name(window: Window) -> str | None:
    """Name of the validation loss: the one logged by the user, else the one sonde measured."""
    return validation_loss(_names(window))


def validation(window: Window, what: str = "loss") -> Column:
    """The validation loss, or the accuracy (`what="acc"`); empty if it is missing."""
    name = validation_name(window) if what == "loss" else validation_accuracy(_names(window))
    return window.get(name or "")


def _names(window: Window) -> list[str]:
    """Names of the scalars with at least one value; losses that sonde measured are stored among the series."""
    logged = [name for name, (steps, _) in window.scalars.items() if len(steps)]
    return [*logged, *(name for name, series in _SEEN.items() if len(window.series.get(series, ((),))[0]))]


@dataclass(frozen=True, slots=True)
class Learned:
    """Levels of the training loss. `left` is NaN for a loss that starts at zero or below."""

    name: str
    steps: NDArray[np.int64]
    values: Array
    """As logged, including NaN."""
    first: float
    """The first value, measured before any update."""
    end: float
    """Median of the last tenth (at least five values); infinite if those are non-finite."""
    best: float
    """Lowest level of the smoothed loss."""
    peak: float
    """The largest finite value after the first step."""
    guessing: float
    """Loss of the best constant prediction, in units of the logged loss; NaN if unknown."""

    @property
    def unit(self) -> float:
        """The loss of a model that has learned nothing: at the start, or of a constant prediction if that is lower."""
        return float(np.fmin(self.first, self.guessing)) if self.first > 0 else np.nan

    @property
    def left(self) -> float:
        """The final loss as a fraction of `unit`: 1 means nothing was learned, more than 1 is worse than that."""
        return self.end / self.unit

    @property
    def best_left(self) -> float:
        return self.best / self.unit

    @property
    def has_diverged(self) -> bool:
        """Whether the loss is non-finite at the end."""
        return not np.isfinite(self.end)

    @property
    def reference(self) -> str:
        """`unit` in words."""
        return "a constant prediction's" if self.guessing < self.first else "its starting value"

    @property
    def outcome(self) -> str:
        """How far the loss has fallen, as a clause: "the loss has not improved (102 % of its starting value)"."""
        if self.has_diverged:
            return "the loss is NaN or infinite at the end"
        if not np.isfinite(self.left):
            return f"the loss ends at {number(self.end, 3)}"
        if self.left > 1.1:
            return f"the loss ends at {percent(self.left)} of {self.reference}"
        if self.left > 0.97 and self.guessing < self.first:
            return (
                "the model is no better than always predicting a constant "
                f"(its loss is {percent(self.left)} of {self.reference})"
            )
        if self.left > 0.97:
            return f"the loss has not improved ({percent(self.left)} of {self.reference})"
        return f"the loss is still at {percent(self.left)} of {self.reference}"

    def left_evidence(self, below: float = 0.7) -> Evidence:
        """The final loss as evidence; `below` is the healthy fraction of `unit`, if it exceeds that."""
        tail = np.arange(len(self.values) - max(5, len(self.values) // 10), len(self.values))
        tail = tail[tail >= 0]
        known = tail[np.isfinite(self.values[tail])]
        near = self.values[known] - self.end if np.isfinite(self.end) else -self.values[known]
        at = int(known[np.abs(near).argmin()]) if len(known) else len(self.values) - 1
        value = float(self.values[at])
        compared = "" if self.unit == self.first else f"; a constant prediction's: {number(self.unit, 3)}"
        is_high = value > below * self.unit
        return Evidence(
            self.name,
            value,
            f"below {number(below * self.unit, 3)}" if is_high else "",
            int(self.steps[at]),
            f"final loss{compared}",
        )


@noted
def learned(window: Window) -> Learned | None:
    """Measure the training loss; None without a loss, or with too few steps."""
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
    """Loss of a constant prediction. It is measured where the loss function is called; the logged loss may be a
    multiple of that."""
    _, baseline = window.get("data/loss/baseline")
    known = baseline[np.isfinite(baseline)]
    kind = _reduction(window)
    if not len(known) or kind not in (MEAN, SUM, UNKNOWN):
        return np.nan
    scale = 1.0
    seen_steps, seen = _call_values(window, kind)
    if kind == SUM and not _is_divided(window, name):
        return np.nan
    if name != "data/loss/value" and len(seen):
        steps, values = window.get(name)
        _, mine, theirs = np.intersect1d(steps, seen_steps, return_indices=True)
        a, b = values[mine], seen[theirs]
        usable = np.isfinite(a) & np.isfinite(b) & (b > 0)
        if not usable.any():
            return np.nan
        ratios = a[usable] / b[usable]
        # The logged loss may include a penalty on the weights; near the end it is closer to the bare loss.
        scale = float(np.median(ratios[len(ratios) // 2 :]))
        at_first = float(np.median(ratios[: max(len(ratios) // 5, 1)]))
        if not (1 / ALIKE < scale / at_first < ALIKE or (a[usable] >= b[usable]).all()):
            return np.nan  # neither a multiple nor a sum: a different loss, of which this one is a part
    # Constant targets, such as a discriminator's, can be predicted without loss: there is nothing to compare with.
    return float(known[-1]) * scale if known[-1] > 0 else np.nan


def _reduction(window: Window) -> int:
    kinds = window.get("data/loss/reduction")[1]
    kinds = kinds[np.isfinite(kinds)]
    return int(kinds[-1]) if len(kinds) else MEAN


def _call_values(window: Window, kind: int) -> Column:
    """The values that the loss function returned; for a sum, the mean over the terms that count."""
    steps, values = window.get("data/loss/value")
    if kind != SUM:
        return steps, values
    own, terms = window.get("data/loss/terms")
    return steps, values / np.where(held(steps, own, terms) > 0, held(steps, own, terms), np.nan)


def _is_divided(window: Window, name: str) -> bool:
    """Whether the program divides the sum that its loss function returns by the number of terms, as Hugging Face's
    models do: the loss is then a mean."""
    steps, values = window.get(name)
    own, means = _call_values(window, SUM)
    _, mine, theirs = np.intersect1d(steps, own, return_indices=True)
    ratios = values[mine] / means[theirs]
    ratios = ratios[np.isfinite(ratios)]
    return len(ratios) > 0 and bool(1 / ALIKE < np.median(ratios) < ALIKE)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Levels of the validation loss, in the same units as the training loss."""

    steps: NDArray[np.int64]
    values: Array
    best: float
    best_step: int
    end: float
    """Median of the last sixth of the points; with few points, the lower of the last two."""
    train: float
    """The training loss at the end."""
    guessing: float
    """Loss of the best constant prediction; NaN if unknown."""
    accuracy: float
    """Median accuracy on held-out data in the second half of the run; NaN if none was logged."""

    @property
    def gap(self) -> float:
        """Validation loss divided by training loss, at the end."""
        return self.end / self.train if self.train > 0 else np.inf

    @property
    def turn(self) -> float:
        """Final validation loss divided by the best one."""
        return self.end / self.best if self.best > 0 else np.nan


@noted
def held_out(window: Window) -> HeldOut | None:
    """Measure the validation loss; None with fewer than three values, or if the losses cannot be compared."""
    steps, values = validation(window)
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    state = learned(window)
    if len(values) < MIN_POINTS or state is None or state.has_diverged or not state.first > 0:
        return None
    # Sums over data sets of different sizes cannot be compared.
    if _reduction(window) == SUM and not _is_divided(window, state.name):
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
    index: int
    """Its index among the values of the loss."""
    step: int
    height: float
    """The value divided by the recent level."""
    level: float
    """The recent median, or a thousandth of the starting loss if that is more."""


def find_spikes(loss: Learned, *, spreads: float = 8.0, times: float = 2.0, share: float = 0.2) -> list[Spike]:
    """Find values above the recent median by several spreads, by a factor and by a fraction of the starting loss.

    All three are required because each alone happens in healthy runs: small batches have wide spreads, and losses
    near zero double.
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
            level = max(level, NEGLIGIBLE * loss.unit)
            found.append(Spike(index, int(loss.steps[index]), value / level, level))
        if is_jump:
            last = index
    return found


def _candidates(values: Array, times: float, gap: float) -> list[int]:
    """Indices at which a spike is possible. The minimum bounds the median from below and is cheap to compute; medians
    at every step would take most of the time of all rules together."""
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
