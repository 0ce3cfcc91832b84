"""The learning rate at every step, and code that sets another one for the optimizer in use."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.wording import number
from sonde.schema.window import Column, Window

RATE: Final = "optim/lr"
SENSIBLE: Final = 0.02
"""Update relative to the weight matrix that a new learning rate aims at: the upper end of healthy runs (95th percentile
1.8e-2)."""
LOWEST: Final = 1e-6
"""Lowest learning rate that is ever suggested; recipes of all optimizers are far above it."""
STABLE_STEPS: Final = 10
"""Number of steps at a lower rate that show that it is stable."""
RISING_SHARE: Final = 0.05
"""A rise that is over by this fraction of the run does not count as a warm-up."""


def rate(window: Window, parameter: Parameter | None = None) -> Column:
    """The learning rate of a parameter's group, else of the first group of all; empty if not recorded."""
    own = window.get(_name(parameter)) if parameter is not None else None
    return own if own is not None and len(own[1]) else window.get(RATE)


def _name(parameter: Parameter) -> str:
    """The name of the series with the learning rate of a parameter's group."""
    optimizer = f"optim/{parameter.optimizer}" if parameter.optimizer > 0 else "optim"
    return f"{optimizer}/group{parameter.group}/lr" if parameter.group > 0 else f"{optimizer}/lr"


def is_at_full_rate(window: Window, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask of the steps at which the learning rate was at least half its maximum; all of them if it is unknown."""
    own_steps, values = rate(window)
    if not len(values) or not nanmax(values) > 0:
        return np.ones(len(steps), np.bool_)
    place = np.clip(np.searchsorted(own_steps, steps, side="right") - 1, 0, len(values) - 1)
    return np.asarray(values[place] >= 0.5 * nanmax(values))


def is_still_rising(window: Window) -> bool:
    """Whether the run ended during its warm-up."""
    _, values = rate(window)
    return bool(len(values) > 2 and values[-1] > 1.2 * values[len(values) // 2] and values[-1] >= nanmax(values))


def warms_up(window: Window) -> bool:
    """Whether the learning rate started at less than half its maximum."""
    _, values = rate(window)
    if not len(values) or not nanmax(values) > 0:
        return False
    early = values[: max(2, int(RISING_SHARE * len(values)))]
    return bool(early[0] < 0.5 * nanmax(values))


def is_adaptive(window: Window) -> bool:
    """Whether the optimizer divides gradients by their own magnitude, as Adam does."""
    name = structure(window).optimizer_type.lower()
    return any(word in name for word in ("adam", "rmsprop", "adagrad", "adadelta", "lion", "adafactor", "lamb"))


def write_rate(window: Window, factor: float) -> str:
    """An instruction to multiply the learning rate by a factor, with code; the new rate is rounded to one digit."""
    _, values = rate(window)
    peak = float(nanmax(values)) if len(values) else math.nan
    verb = "Lower" if factor < 1 else "Raise"
    if not peak > 0 or not math.isfinite(peak * factor) or not factor > 0:
        return f"{verb} the learning rate to {number(factor, 1)} times its current value"
    return write_new_rate(window, peak, peak * factor)


def write_new_rate(window: Window, old: float, new: float) -> str:
    """An instruction to change the learning rate, with code; the new rate is rounded to one digit."""
    name, verb = structure(window).optimizer_type or "optimizer", "Lower" if new < old else "Raise"
    return f"{verb} the learning rate from {number(old, 3)} to {one_digit(new)}: `{name}(..., lr={one_digit(new)})`"


def stable_rate(window: Window, step: int, size: float, growth: float = math.nan) -> tuple[float, float] | None:
    """(current, lower) learning rate for a run whose updates became too large at a step; None if the rate is unknown.

    The lower one is the highest with which the loss was stable before that step, if the rate was lower then. Otherwise
    it is the rate at which an update of `size`, relative to its weight, would have been SENSIBLE. For gradient descent,
    the loss tells how far the rate is above the limit: along the steepest direction, a step multiplies the error by
    1 - rate * curvature, so a loss that grows by a factor g per step has a curvature of (1 + sqrt(g)) / rate, and the
    rate 1 / curvature is half the limit.
    """
    steps, values = rate(window)
    known = np.isfinite(values) & (values > 0)
    steps, values = steps[known], values[known]
    if not len(values):
        return None
    current = float(values[max(int(np.searchsorted(steps, step, side="right")) - 1, 0)])
    earlier = values[steps < step]
    if len(earlier) >= STABLE_STEPS and (highest := float(earlier[:-1].max())) < current:
        return current, highest
    lower = current * min(0.1, SENSIBLE / size)
    is_squared = structure(window).loss in ("", "mse_loss")
    if growth > 1 and is_squared and not is_adaptive(window):
        lower = max(lower, current / (1 + math.sqrt(growth)))
    return current, max(lower, min(LOWEST, current))


def one_digit(value: float) -> str:
    """A number rounded to one significant digit, as code.

    >>> one_digit(0.00234)
    '0.002'
    """
    return number(value, 1).replace(",", "")
