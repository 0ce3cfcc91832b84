"""Training convergence: whether and how far the loss fell, when it stopped falling, and how noisy it is.

All reports take their verdict from here.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.diagnose.measures.loss import loss_name
from sonde.schema.window import Window
from sonde.show.analyses.analysis import Analysis, Chart, Floats, Line, Quantity, Steps, Tone, line
from sonde.show.plot.axes import spans_decades
from sonde.show.term.number import counted

MIN_POINTS: Final = 10
MANY_POINTS: Final = 2_000
"""A longer loss is smoothed by blocks."""
STILL: Final = 0.05
"""Fraction of the total decrease that must fall in the last third for a run to count as still improving ..."""
DONE: Final = 0.01
"""... and below which it counts as converged."""
RISEN: Final = 0.1
"""Fraction of the total decrease by which a loss may end above its best."""
RUNAWAY: Final = 1.5
"""A loss that ends above its first value times this factor has diverged."""
SURE: Final = 2.0
"""Standard errors beyond which a change in the last third counts: the loss of a batch fluctuates."""
CERTAIN: Final = 4.5
"""Standard errors by which a loss must have risen above its best level: the best of many noisy levels is about 2.5
below a flat loss."""
ENOUGH: Final = 30
"""Number of values from which a loss can be said to have converged."""
SPIKE: Final = 6.0
"""Height of a spike above the surrounding level, in typical deviations."""

_MEDIAN_ERROR: Final = 1.2533
"""Standard error of the median of n values, times sqrt(n), divided by their standard deviation."""

TITLE: Final = "Training convergence"


def convergence(window: Window) -> Analysis:
    """Analyze the decrease of the training loss."""
    name = loss_name(window)
    if name is None:
        verdict = 'No training loss was logged, so convergence cannot be judged. Log it: sonde.log({"loss": loss}).'
        return Analysis(key="convergence", title=TITLE, tone="unknown", verdict=verdict)
    steps, values = window.get(name)
    finite = np.isfinite(values)
    if finite.sum() < MIN_POINTS:
        has = counted(int(finite.sum()), "finite value")
        verdict = f"{name} has {has}; judging it needs at least {MIN_POINTS}."
        tone: Tone = "bad" if not finite.all() else "unknown"
        return Analysis(key="convergence", title=TITLE, tone=tone, verdict=verdict, charts=_charts(window, name, None))
    with np.errstate(all="ignore"):  # differences of a loss near the largest float overflow; comparisons remain valid
        level = _level(values[finite])
        fall = _Fall(steps[finite], values[finite], level)
    tone, verdict = _judge(name, steps, finite, fall)
    return Analysis(
        key="convergence",
        title=TITLE,
        tone=tone,
        verdict=verdict,
        quantities=_quantities(fall, int((~finite).sum())),
        charts=_charts(window, name, line("level", fall.steps, level)),
    )


class _Fall:
    """Levels of a loss and the steps at which they were reached."""

    def __init__(self, steps: Steps, values: Floats, level: Floats) -> None:
        self.steps, self.values, self.level = steps, values, level
        tenth = max(5, len(values) // 10)
        self.first, self.last = float(values[0]), float(np.median(values[-tenth:]))
        best = int(np.argmin(level))
        self.best, self.best_step = float(level[best]), int(steps[best])
        self.total = self.first - self.best
        self.noise = float(np.median(np.abs(values - level) / np.abs(level)))
        self.scatter = _scatter(values)
        self.error = _MEDIAN_ERROR * self.scatter * float(np.sqrt(2 / tenth))
        has_level_fallen = float(np.median(values[:tenth])) - self.best > 3 * self.error
        self.is_one = has_level_fallen or self.total > 4 * self.scatter
        self.drift, self.drift_error = _drift(values[-max(len(values) // 3, 4) :])
        self.recent = self.drift / self.total if self.total > 0 else 0.0
        around = _level(np.abs(values - level))  # the scatter of a loss that falls by decades decreases
        # On a steep slope values are above the level without being spikes: a spike also rises above the value before.
        around = np.maximum(around, 0.01 * np.abs(level))
        is_high = values - level > SPIKE * 1.5 * around
        self.num_spikes = int((is_high & (np.diff(values, prepend=values[0]) > SPIKE * around)).sum())
        reached = np.flatnonzero(_level(values, 5) <= self.first - 0.9 * self.total)
        self.step_90 = int(steps[reached[0]]) if self.total > 0 and len(reached) else None


def _level(values: Floats, width: int = 0) -> Floats:
    """Running median over a tenth of the values, or over `width` of them; single spikes do not affect it."""
    block = len(values) // MANY_POINTS
    if (
        block > 1
    ):  # thousands of values per window at 100,000 points take a minute; medians of blocks give the same result
        middles = np.arange(len(values) // block) * block + block // 2
        coarse = np.median(values[: len(middles) * block].reshape(-1, block), axis=1)
        return np.interp(np.arange(len(values)), middles, _level(coarse, width))
    half = (width or max(5, len(values) // 10)) // 2
    padded = np.pad(values, half, constant_values=np.nan)  # the window is shorter at both ends
    level: Floats = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=-1)
    return level


def _scatter(values: Floats) -> float:
    """Standard deviation of the noise, from differences between neighbours: longer trends are not noise."""
    return 1.4826 * float(np.median(np.abs(np.diff(values)))) / float(np.sqrt(2))


def _drift(values: Floats) -> tuple[float, float]:
    """The decrease of the values from start to end, and its standard error."""
    half = len(values) // 2
    fall = 2 * float(np.median(values[:half]) - np.median(values[-half:]))
    return fall, 2 * _MEDIAN_ERROR * _scatter(values) * float(np.sqrt(2 / half))


def _judge(name: str, steps: Steps, finite: np.ndarray, fall: _Fall) -> tuple[Tone, str]:
    if not finite[-1]:
        first_bad = int(steps[np.flatnonzero(~finite)[0]])
        return "bad", f"{name} diverged: it ends as NaN or Inf, first at step {first_bad:,}."
    change = f"from {fall.first:.4g} to {fall.last:.4g}"
    if fall.last > RUNAWAY * fall.first > 0 and fall.last - fall.first > SURE * fall.scatter:
        return "bad", f"{name} diverged: it rose {change}."
    if not fall.is_one:
        return "bad", f"{name} did not improve: it went {change}, which is within its variation from step to step."
    if fall.last - fall.best > max(RISEN * fall.total, SURE * fall.scatter, CERTAIN * fall.error):
        return (
            "watch",
            f"{name} was best at step {fall.best_step:,} ({fall.best:.4g}) and has risen to {fall.last:.4g} since.",
        )
    fell = f"{name} fell {change}"
    is_moving = fall.drift > SURE * fall.drift_error
    if is_moving and fall.recent > STILL:
        share = f"the last third of training brought {fall.recent:.0%} of the decrease"
        return "watch", f"{fell} and was still falling when the run ended: {share}. Training longer should help."
    if len(fall.values) < ENOUGH:
        return "watch", f"{fell}. With {len(fall.values)} values it is too early to tell whether it has converged."
    reached = "" if fall.step_90 is None else f", 90 % of it by step {fall.step_90:,}"
    brought = f"the last third of training brought {max(fall.recent, 0.0):.1%} of the decrease"
    if is_moving and fall.recent > DONE:
        return "good", f"{fell}{reached}. It is levelling off: {brought}."
    if fall.recent > DONE:
        return (
            "good",
            f"{fell}{reached}. It has converged: in the last third of training it changed by no more than its noise.",
        )
    return "good", f"{fell}{reached}. It has converged: {brought}."


def _quantities(fall: _Fall, num_odd: int) -> tuple[Quantity, ...]:
    return (
        Quantity("first value", fall.first, "the loss before the first update"),
        Quantity("last level", fall.last, "median of the last tenth"),
        Quantity("best level", fall.best, "lowest running median"),
        Quantity("best step", fall.best_step, "step of the best level", is_step=True),
        Quantity("90 % step", fall.step_90, "step at which 90 % of the decrease was reached", is_step=True),
        Quantity("recent share", fall.recent, "fraction of the decrease in the last third of the steps"),
        Quantity("noise", fall.noise, "typical deviation from the level, relative to it"),
        Quantity("spikes", fall.num_spikes, "values far above the surrounding level"),
        Quantity("not finite", num_odd, "values that are NaN or infinite"),
    )


def _charts(window: Window, name: str, level: Line | None) -> tuple[Chart, ...]:
    steps, values = window.get(name)
    lines = (line(name, steps, values), *([level] if level else []))
    charts = [Chart(title=f"{name} over steps", lines=lines, is_log=spans_decades([values]))]
    rate = next(
        (one for one in ("lr", "train/lr", "learning_rate", "train/learning_rate") if one in window.scalars), ""
    )
    rate = rate or next((one for one in window.scalars if one.rpartition("/")[2].startswith("lr")), "")
    if rate:
        charts.append(Chart(title=f"{rate} over steps", lines=(line(rate, *window.scalars[rate]),)))
    return tuple(charts)
