"""The size of optimizer steps relative to the weights, on a scale that does not shrink with small initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.curves import nanmedian
from sonde.diagnose.measures.model import Parameter, structure
from sonde.schema.sketch import Array
from sonde.schema.window import Window, noted

NEEDS: Final = ("update/*/norm", "param/*/norm", "param/*/n")
FIRST: Final = 5
"""Number of first updates, in which a learning rate that is too high shows most clearly."""
MIN_ELEMENTS: Final = 16
"""Smaller matrices are left out, unless the model has no other: a linear regression may have ten weights."""
MIN_ELEMENTS_ALONE: Final = 2


@dataclass(frozen=True, slots=True)
class Motion:
    """Norm of the update divided by the norm of the weight, for each weight matrix and step.

    The weight's norm counts as at least that of a matrix filled with 1/sqrt(fan_in): relative to weights that start
    small (a language model's 0.02), one step of Adam is large but harmless.
    """

    sites: tuple[str, ...]
    steps: NDArray[np.int64]
    ratios: Array
    """(sites, steps); NaN where a step was not measured."""

    @property
    def of_step(self) -> Array:
        """The median over matrices, per step."""
        return np.asarray(nanmedian(self.ratios, axis=0))

    @property
    def largest_of_step(self) -> Array:
        """The maximum over matrices, per step."""
        return np.asarray(np.fmax.reduce(self.ratios, axis=0))

    @property
    def at_first(self) -> float:
        """The largest of the first updates of all matrices."""
        first = self.ratios[:, :FIRST]
        return float(np.fmax.reduce(first, axis=None)) if first.size else np.nan

    @property
    def typical(self) -> float:
        """The median over matrices and steps."""
        return float(nanmedian(self.of_step)) if self.ratios.size else np.nan


@noted
def motion(window: Window) -> Motion | None:
    """Measure how the weight matrices moved; None if updates were not recorded."""
    return _motion(window, MIN_ELEMENTS) or _motion(window, MIN_ELEMENTS_ALONE)


def _motion(window: Window, min_elements: int) -> Motion | None:
    updates, norms = window.grid("update/*/norm"), window.grid("param/*/norm")
    if not len(updates) or not len(norms):
        return None
    sites, rows = [], []
    for site in updates.sites:
        if site not in norms.sites:
            continue
        yardstick = _yardstick(window, site, min_elements)
        if yardstick is None:
            continue
        weight = _at(updates.steps, norms.steps, norms.row(site))
        with np.errstate(divide="ignore", invalid="ignore"):
            rows.append(updates.row(site) / np.fmax(weight, yardstick))
        sites.append(site)
    return Motion(tuple(sites), updates.steps, np.stack(rows)) if rows else None


def _yardstick(window: Window, site: str, min_elements: int) -> float | None:
    """The minimum norm a weight counts with; None if it is not a weight matrix, or starts at zero on purpose."""
    start = window.get(f"param/{site}/norm")[1]
    if not len(start) or not start[0] > 0:
        return None
    known = structure(window).parameter(site)
    if known is None:
        return _without_structure(window, site, float(start[0]))
    return _natural_norm(known, min_elements) if known.is_matrix and known.trainable else None


def _natural_norm(parameter: Parameter, min_elements: int) -> float | None:
    size = int(np.prod(parameter.shape))
    fan_in = parameter.fan_in or int(np.prod(parameter.shape[1:]))
    return float(np.sqrt(size / fan_in)) if size >= min_elements else None


def _without_structure(window: Window, site: str, start: float) -> float | None:
    """The minimum norm without known shapes: large parameters not named bias or norm count as matrices."""
    size = window.get(f"param/{site}/n")[1]
    words = site.lower()
    if not len(size) or size[0] < 4 * MIN_ELEMENTS or "bias" in words or "norm" in words or "emb" in words:
        return None
    return start


def _at(wanted: NDArray[np.int64], steps: NDArray[np.int64], values: Array) -> Array:
    """The last known value at each of the wanted steps."""
    if len(wanted) == len(steps) and np.array_equal(wanted, steps):
        return values
    place = np.clip(np.searchsorted(steps, wanted, side="right") - 1, 0, len(steps) - 1)
    return values[place]
