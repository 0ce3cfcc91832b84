"""Where a process is in its training, and how it returns to an earlier step: that begins a new attempt."""

from __future__ import annotations

import math


class Position:
    """Which steps a process may return to: any step before it has made one, because it may have loaded any
    checkpoint; afterwards none that lies ahead."""

    def __init__(self) -> None:
        self._is_fresh = True
        self._has_returned = False
        self._furthest = math.inf

    @property
    def is_new(self) -> bool:
        """Whether no step was made, and nobody has said which one comes first."""
        return self._is_fresh and not self._has_returned

    @property
    def is_fresh(self) -> bool:
        """Whether no step was made since the process began, or since it returned to an earlier step."""
        return self._is_fresh

    def step_made(self) -> None:
        self._is_fresh = False

    def may_return_to(self, step: int, next_step: int) -> bool:
        return 0 <= step <= (self._furthest if self._is_fresh else next_step)

    def returned(self, next_step: int) -> None:
        """`next_step` is the one that would have come."""
        self._furthest = max(self._furthest, next_step) if self._is_fresh else next_step
        self._is_fresh = self._has_returned = True
