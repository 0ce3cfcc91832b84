"""The position of a process in its training. Returning to an earlier step starts a new attempt."""

from __future__ import annotations

import math


class Position:
    """The steps that a process may return to: any step before it has made one, because it may have loaded any
    checkpoint; afterwards no future step."""

    def __init__(self) -> None:
        self._is_fresh = True
        self._has_returned = False
        self._furthest = math.inf

    @property
    def is_new(self) -> bool:
        """Whether no step was made, and no first step was set."""
        return self._is_fresh and not self._has_returned

    @property
    def is_fresh(self) -> bool:
        """Whether no step was made since the process started, or since it returned to an earlier step."""
        return self._is_fresh

    def step_made(self) -> None:
        self._is_fresh = False

    def may_return_to(self, step: int, next_step: int) -> bool:
        return 0 <= step <= (self._furthest if self._is_fresh else next_step)

    def returned(self, next_step: int) -> None:
        """`next_step` is the step that would have come."""
        self._furthest = max(self._furthest, next_step) if self._is_fresh else next_step
        self._is_fresh = self._has_returned = True
