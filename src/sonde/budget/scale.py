"""How much longer a step takes for each second of our work, from differences of neighbouring steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Final

_FADE: Final = 0.9
_MIN_PAIRS: Final = 8


@dataclass(slots=True)
class Scale:
    """Extra seconds of a step per second of our work: a ratio of sums, so that it is right for all of our work
    together, of which some may overlap with the model's and some may not."""

    num: float = 0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0

    def fade(self) -> None:
        """Give less weight to old steps: a run changes."""
        self.num *= _FADE
        self._x, self._y = _FADE * self._x, _FADE * self._y
        self._xx, self._xy, self._yy = _FADE * self._xx, _FADE * self._xy, _FADE * self._yy

    def add(self, pairs: list[tuple[float, float]]) -> None:
        """Add (difference of our time, difference of step time) pairs of neighbouring steps; outliers are ignored."""
        usable = [(x, y) for x, y in pairs if x]
        if len(usable) < 2:
            return
        typical = statistics.median(abs(y) for _, y in usable)
        for x, y in usable:
            if abs(y) <= 6 * typical:
                self.num += 1
                self._x, self._y = self._x + abs(x), self._y + math.copysign(y, x * y)
                self._xx, self._xy, self._yy = self._xx + x * x, self._xy + x * y, self._yy + y * y

    @property
    def value(self) -> float:
        return self._y / self._x if self._x else 1.0

    @property
    def error(self) -> float | None:
        """Its standard error; None as long as there is too little data."""
        if self.num < _MIN_PAIRS or not self._x:
            return None
        left_over = max(self._yy - 2 * self.value * self._xy + self.value**2 * self._xx, 0.0)
        return math.sqrt(left_over * self.num / (self.num - 1)) / self._x

    @property
    def trusted(self) -> float:
        """The value as far as it is known: the less certain, the closer to one."""
        if self.error is None:
            return 1.0
        weight = 1.0 / (1.0 + (self.error / 0.3) ** 2)
        return min(max(1.0 + weight * (self.value - 1.0), 0.25), 4.0)
