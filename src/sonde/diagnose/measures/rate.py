"""The learning rate as it was set step by step, and how another one is written as code for this very optimizer."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.model import Parameter, structure
from sonde.schema.window import Column, Window

RATE: Final = "optim/lr"
RISING_SHARE: Final = 0.05
"""A warm-up is over by this share of the run at the earliest; what rises sooner is a detail."""


def rate(window: Window, parameter: Parameter | None = None) -> Column:
    """The learning rate of a parameter's group, else of the first optimizer's first; empty when it was not seen."""
    own = window.get(_name(parameter)) if parameter is not None else None
    return own if own is not None and len(own[1]) else window.get(RATE)


def _name(parameter: Parameter) -> str:
    """Under which the learning rate of its group is recorded."""
    optimizer = f"optim/{parameter.optimizer}" if parameter.optimizer > 0 else "optim"
    return f"{optimizer}/group{parameter.group}/lr" if parameter.group > 0 else f"{optimizer}/lr"


def is_at_full_rate(window: Window, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """At which of these steps the learning rate was at least half its highest; all of them when it is not known."""
    own_steps, values = rate(window)
    if not len(values) or not nanmax(values) > 0:
        return np.ones(len(steps), np.bool_)
    place = np.clip(np.searchsorted(own_steps, steps, side="right") - 1, 0, len(values) - 1)
    return np.asarray(values[place] >= 0.5 * nanmax(values))


def is_still_rising(window: Window) -> bool:
    """Whether the run ended within its warm-up."""
    _, values = rate(window)
    return bool(len(values) > 2 and values[-1] > 1.2 * values[len(values) // 2] and values[-1] >= nanmax(values))


def warms_up(window: Window) -> bool:
    """Whether the learning rate began at less than half of what it reached later."""
    _, values = rate(window)
    if not len(values) or not nanmax(values) > 0:
        return False
    early = values[: max(2, int(RISING_SHARE * len(values)))]
    return bool(early[0] < 0.5 * nanmax(values))


def is_adaptive(window: Window) -> bool:
    """Whether the optimizer divides gradients by their own size, as Adam does."""
    name = structure(window).optimizer_type.lower()
    return any(word in name for word in ("adam", "rmsprop", "adagrad", "adadelta", "lion", "adafactor", "lamb"))


def write_rate(window: Window, factor: float) -> str:
    """Code that sets the learning rate to a multiple of what it is now, rounded to one digit."""
    _, values = rate(window)
    name = structure(window).optimizer_type or "optimizer"
    peak = float(nanmax(values)) if len(values) else math.nan
    if not peak > 0 or not math.isfinite(peak * factor) or not factor > 0:
        return f"{name}(..., lr=...)  # {factor:.1g} times what it is now"
    return f"{name}(..., lr={one_digit(peak * factor)})  # now {peak:g}"


def one_digit(value: float) -> str:
    """
    >>> one_digit(0.00234)
    '0.002'
    """
    return f"{float(f'{value:.0e}'):g}"
