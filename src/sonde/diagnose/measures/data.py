"""Statistics of the model's inputs, targets and outputs over all inspections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.model import structure
from sonde.schema.sketch import Array
from sonde.schema.window import Window

REGRESSIONS: Final = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
MIN_SEEN: Final = 5
"""Minimum number of inspections to draw a conclusion from."""


@dataclass(frozen=True, slots=True)
class Series:
    """The finite values of one statistic, in the order of its steps."""

    steps: NDArray[np.int64]
    values: Array

    def __len__(self) -> int:
        return len(self.values)

    @property
    def typical(self) -> float:
        return self._of(np.median)

    @property
    def late(self) -> float:
        """Median of the second half."""
        return self._of(lambda values: np.median(values[len(values) // 2 :]))

    @property
    def lowest(self) -> float:
        return self._of(np.min)

    @property
    def highest(self) -> float:
        return self._of(np.max)

    @property
    def mean(self) -> float:
        return self._of(np.mean)

    def _of(self, function: Callable[[Array], float]) -> float:
        """Apply a function to the values; NaN, with which every comparison is false, if there are none."""
        return float(function(self.values)) if len(self.values) else float("nan")


def seen(window: Window, name: str) -> Series:
    """The finite values of a statistic such as `data/output/max`.

    >>> seen(Window(), "data/output/max").typical
    nan
    """
    steps, values = window.get(name)
    finite = np.isfinite(values)
    return Series(steps[finite], values[finite])


def is_language_model(window: Window) -> bool:
    """Whether the targets are the next tokens of the input."""
    return seen(window, "data/target/shift").typical > 0.5


def is_classification(window: Window) -> bool:
    return seen(window, "data/target/is_class").typical == 1.0


def is_regression(window: Window) -> bool:
    """Whether the targets are numbers, not classes."""
    loss = structure(window).loss
    return (not loss or loss in REGRESSIONS) and seen(window, "data/target/is_class").typical == 0.0


def last_module(window: Window) -> str:
    """Type of the last leaf module to run, not counting losses: `Sigmoid`, `Linear`; empty if unknown."""
    leaves = [m for m in structure(window).in_order if m.is_leaf and m.kind not in ("loss", "dropout")]
    return leaves[-1].type if leaves else ""
