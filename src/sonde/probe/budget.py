"""How often to record so that the cost stays within a budget. Pure arithmetic on measured times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

_REVIEW_STEPS: Final = 50
_MAX_STRIDE: Final = 1000


@dataclass(slots=True)
class Governor:
    """Records every `stride`-th step; the first `free_steps` steps are never thinned.

    >>> governor = Governor(budget=0.01, free_steps=0)
    >>> for step in range(101):
    ...     changed = governor.observe(step, own_s=0.004, step_s=0.116, recorded=True)
    >>> governor.stride
    4
    """

    budget: float | None
    free_steps: int
    stride: int = 1
    _own_s: float = field(default=0.0, init=False)
    _train_s: float = field(default=0.0, init=False)
    _recorded: int = field(default=0, init=False)
    _steps: int = field(default=0, init=False)
    total_own_s: float = field(default=0.0, init=False)
    total_s: float = field(default=0.0, init=False)

    @property
    def overhead(self) -> float:
        """Share of all time so far that was ours, measured on the host."""
        return self.total_own_s / self.total_s if self.total_s else 0.0

    def allows(self, step: int) -> bool:
        """Whether this step may be recorded."""
        return self.budget is None or step < self.free_steps or step % self.stride == 0

    def observe(self, step: int, *, own_s: float, step_s: float, recorded: bool) -> bool:
        """Take one step's times in; True when the stride has changed."""
        self.total_own_s += own_s
        self.total_s += max(step_s, own_s)
        self._own_s += own_s
        self._train_s += max(step_s - own_s, 0.0)
        self._recorded += recorded
        self._steps += 1
        if self._steps < _REVIEW_STEPS:
            return False
        return self._review(step)

    def _review(self, step: int) -> bool:
        before = self.stride
        if self.budget is not None and step >= self.free_steps and self._recorded:
            per_recorded = self._own_s / self._recorded
            per_step = self._train_s / self._steps
            allowed_s = self.budget * per_step
            # Steps that take no time at all are a clock too coarse to tell.
            wanted = math.ceil(min(per_recorded / allowed_s, _MAX_STRIDE)) if allowed_s else 1
            # Going back takes a clear margin, or the stride would swing to and fro.
            if wanted > self.stride or wanted < 0.7 * self.stride:
                self.stride = min(max(wanted, 1), _MAX_STRIDE)
        self._own_s = self._train_s = 0.0
        self._recorded = self._steps = 0
        return self.stride != before
