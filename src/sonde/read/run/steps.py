"""Which steps a question is about: a step, a range or a slice, whose negative bounds count from the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import UsageError
from sonde.read.run.segments import EVERYTHING, Span

Steps = int | range | slice | None


@dataclass(frozen=True, slots=True)
class StepFilter:
    """A span of steps, and every how many of them."""

    span: Span
    stride: int = 1

    def mask(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (steps >= self.span.first) & (steps <= self.span.last)
        return inside if self.stride == 1 else inside & ((steps - self.span.first) % self.stride == 0)


ALL_STEPS: Final = StepFilter(EVERYTHING)
NO_STEPS: Final = StepFilter(Span(1, 0))


def parse_steps(steps: Steps, last_step: int) -> StepFilter:
    """Make a filter of what the user gave.

    >>> parse_steps(slice(-10, None), last_step=99).span.first
    90
    """
    if steps is None:
        return ALL_STEPS
    if isinstance(steps, int) and not isinstance(steps, bool):
        step = steps + last_step + 1 if steps < 0 else steps
        return StepFilter(Span(step, step))
    if isinstance(steps, range):
        if steps.step < 1:
            raise UsageError(f"steps={steps!r} counts down; give a range that counts up.")
        return StepFilter(Span(steps.start, steps.stop - 1), steps.step)
    if isinstance(steps, slice):
        stride = 1 if steps.step is None else int(steps.step)
        if stride < 1:
            raise UsageError(f"steps={steps!r} counts down; give a slice that counts up.")
        first, stop = (_bound(bound, last_step) for bound in (steps.start, steps.stop))
        low = (EVERYTHING.first if stride == 1 else 0) if first is None else first
        return StepFilter(Span(low, EVERYTHING.last if stop is None else stop - 1), stride)
    raise UsageError(f"steps is a step, a range or a slice, as in  steps=range(100, 200); got {steps!r}.")


def _bound(bound: int | None, last_step: int) -> int | None:
    return bound if bound is None or bound >= 0 else max(0, bound + last_step + 1)
