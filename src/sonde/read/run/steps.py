"""Selection of steps: a step, a range, a slice or its text "100:200"; negative bounds count from the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import UsageError
from sonde.read.run.segments import EVERYTHING, Span

Steps = int | range | slice | str | None


@dataclass(frozen=True, slots=True)
class StepFilter:
    """A span of steps, with a stride."""

    span: Span
    stride: int = 1

    def mask(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        inside: NDArray[np.bool_] = (steps >= self.span.first) & (steps <= self.span.last)
        return inside if self.stride == 1 else inside & ((steps - self.span.first) % self.stride == 0)


ALL_STEPS: Final = StepFilter(EVERYTHING)
NO_STEPS: Final = StepFilter(Span(1, 0))


def parse_steps(steps: Steps, last_step: int) -> StepFilter:
    """Convert the user's selection to a filter.

    >>> parse_steps(slice(-10, None), last_step=99).span.first, parse_steps("-10:", last_step=99).span.first
    (90, 90)
    """
    if isinstance(steps, str):
        steps = step_slice(steps)
    if steps is None:
        return ALL_STEPS
    if isinstance(steps, int) and not isinstance(steps, bool):
        step = steps + last_step + 1 if steps < 0 else steps
        return StepFilter(Span(step, step))
    if isinstance(steps, range):
        if steps.step < 1:
            raise UsageError(f"steps={steps!r} counts down. Use a range that counts up.")
        return StepFilter(Span(steps.start, steps.stop - 1), steps.step)
    if isinstance(steps, slice):
        stride = 1 if steps.step is None else int(steps.step)
        if stride < 1:
            raise UsageError(f"steps={steps!r} counts down. Use a slice that counts up.")
        first, stop = (_bound(bound, last_step) for bound in (steps.start, steps.stop))
        low = (EVERYTHING.first if stride == 1 else 0) if first is None else first
        return StepFilter(Span(low, EVERYTHING.last if stop is None else stop - 1), stride)
    raise UsageError(f"invalid steps={steps!r}. Give a step, a range or a slice, e.g.  steps=range(100, 200)")


def step_slice(steps: Steps) -> slice | None:
    """The selection as a slice: "100:200" and range(100, 200) are slice(100, 200), a step is a slice of one.

    >>> step_slice("100"), step_slice("-100:"), step_slice(-1)
    (slice(100, 101, None), slice(-100, None, None), slice(-1, None, None))
    """
    if isinstance(steps, str):
        return _from_text(steps)
    if isinstance(steps, range):
        return slice(steps.start, steps.stop, steps.step)
    if isinstance(steps, int) and not isinstance(steps, bool):
        return slice(steps, steps + 1 or None)
    if steps is None or isinstance(steps, slice):
        return steps
    raise UsageError(f"invalid steps={steps!r}. Give a step, a range or a slice, e.g.  steps=range(100, 200)")


def _from_text(text: str) -> slice:
    try:
        bounds = [int(part) if part.strip() else None for part in text.split(":")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 3 or bounds == [None] or (len(bounds) == 3 and bounds[2] is not None and bounds[2] < 1):
        raise UsageError(f'invalid steps "{text}": give first:stop, e.g. 100:200, :50 or -100:')
    if len(bounds) == 1 and bounds[0] is not None:
        return slice(bounds[0], bounds[0] + 1 or None)
    return slice(*bounds)


def _bound(bound: int | None, last_step: int) -> int | None:
    return bound if bound is None or bound >= 0 else max(0, bound + last_step + 1)
