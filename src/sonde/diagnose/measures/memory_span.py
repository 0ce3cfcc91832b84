"""The memory of recurrent layers: the gradient at the first input relative to that at the last, at the start and at
the end of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.schema.window import Window

MIN_LENGTH: Final = 8
"""Sequences shorter than this need almost no memory."""
AT_START: Final = 4
"""Number of inspections that count as the start: the weights are still close to their initial values."""


@dataclass(frozen=True, slots=True)
class Span:
    """The memory of one recurrent layer."""

    site: str
    length: int
    first_step: int
    start: float
    """Reach at the start: norm of d out_last / d x_first divided by that of d out_last / d x_last."""
    end: float
    """Reach over the second half of the run."""

    def per_step(self, reach: float) -> float:
        """The factor by which a gradient is multiplied per step back in time."""
        return float(np.exp(np.log(max(reach, 1e-300)) / self.length))


def memory_spans(window: Window) -> list[Span]:
    """The memory of every recurrent layer that was inspected often enough."""
    found = []
    for site, steps, values in window.by_site("rnn/*/reach"):
        known = np.isfinite(values)
        lengths = window.get(f"rnn/{site}/length")[1]
        lengths = lengths[np.isfinite(lengths)]
        if known.sum() < 2 or not len(lengths) or np.median(lengths) < MIN_LENGTH:
            continue
        reach = values[known]
        late = reach[len(reach) // 2 :]
        start = float(np.median(reach[:AT_START]))
        found.append(Span(site, int(np.median(lengths)), int(steps[known][0]), start, float(np.median(late))))
    return found
