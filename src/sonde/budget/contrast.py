"""How much longer a step takes because sonde follows it, beyond our own work that the clocks see.

Following a step calls hooks, evicts caches, keeps tensors alive and takes the interpreter: no clock of ours runs then.
What a step takes by itself is known from rests, in which sonde only counts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

_MIN_RESTS: Final = 3
_MIN_STEPS: Final = 6
_KEPT_STEPS: Final = 60


@dataclass(slots=True)
class Contrast:
    """Compares the steps that are followed with those at rest.

    >>> contrast = Contrast()
    >>> for _ in range(20):
    ...     contrast.rested(0.010)
    ...     contrast.followed(0.012)
    >>> contrast.bare_s, round(contrast.hidden_s, 6), round(contrast.total_s, 6)
    (0.01, 0.002, 0.04)
    """

    num_rests: int = field(default=0, init=False)
    _rests: deque[float] = field(default_factory=lambda: deque(maxlen=_MIN_RESTS), init=False)
    """The last rests: a run changes."""
    _early: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS), init=False)
    """Steps from before the first rests."""
    _extra: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS), init=False)
    """Differences between a step and the rests before it."""
    _hidden_s: float = field(default=0.0, init=False)
    _settled_s: float = field(default=0.0, init=False)
    _num_open: int = field(default=0, init=False)
    """Followed steps since the last `settle`."""

    def rested(self, step_s: float) -> None:
        """A rest is over; its steps took this long on average."""
        self._rests.append(step_s)
        self.num_rests += 1
        if self.num_rests >= _MIN_RESTS:
            self._extra.extend(one_s - self._near_s for one_s in self._early)
            self._early.clear()
            self._estimate()

    def followed(self, step_s: float | None) -> None:
        """A step that was followed took this long, without our work in it; None if that is not known."""
        self._num_open += 1
        if step_s is None:
            return
        if self.num_rests < _MIN_RESTS:
            self._early.append(step_s)
        else:
            self._extra.append(step_s - self._near_s)

    def settle(self) -> None:
        """Charge what is known so far; what comes later does not change it."""
        if self.num_rests >= _MIN_RESTS:
            self._estimate()
            self._settled_s += self._hidden_s * self._num_open
            self._num_open = 0

    def changed(self) -> None:
        """Steps are of another length from now on."""
        self.settle()
        self._rests.clear()
        self._early.clear()
        self._extra.clear()
        self.num_rests, self._hidden_s = 0, 0.0

    @property
    def bare_s(self) -> float:
        """The time of a step that is not followed; 0 if it is not known."""
        return self._near_s if self.num_rests >= _MIN_RESTS else 0.0

    @property
    def hidden_s(self) -> float:
        """The time that following a step adds to it."""
        return self._hidden_s

    @property
    def total_s(self) -> float:
        """The same of all steps so far."""
        return self._settled_s + self._hidden_s * self._num_open

    @property
    def _near_s(self) -> float:
        return statistics.median(self._rests)

    def _estimate(self) -> None:
        """The median difference: as much of it as is certain, so that noise adds up to nothing."""
        if len(self._extra) < _MIN_STEPS:
            return
        usual_s = statistics.median(self._extra)
        spread_s = statistics.median(abs(one_s - usual_s) for one_s in self._extra)
        twice_s = 2 * 1.86 * spread_s / math.sqrt(min(len(self._extra), 2 * self.num_rests))
        self._hidden_s = usual_s**3 / (usual_s**2 + twice_s**2) if usual_s > 0 else 0.0
