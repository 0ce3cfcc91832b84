"""The measured cost of recording each kind; all costs are of a kind's parts together."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

_KEPT: Final = 20
_RECENT: Final = 100
"""Older costs are discarded, as long as there are a few newer ones."""
_FEW: Final = 3
_FAR_OUT: Final = 6
"""Ratio to the usual cost above which a cost is an exception."""


@dataclass(slots=True)
class Costs:
    """The latest costs of each kind.

    >>> costs = Costs()
    >>> costs.add(0, {"grads": 0.25}, {})
    >>> costs.of("grads"), costs.of("optimizer"), costs.is_measured("optimizer"), costs.has_news
    (0.25, 0.0, False, True)
    """

    measured: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    """(step, cost) pairs."""
    lengths: dict[str, float] = field(default_factory=dict)
    """Time by which a kind may make a step longer, on the host or on the device."""
    provisional: set[str] = field(default_factory=set)
    """Kinds whose cost was measured while everything was recorded at once."""
    has_news: bool = False
    """Whether the cost of another kind has become known since the strides were set."""

    def is_measured(self, kind: str) -> bool:
        return bool(self.measured.get(kind))

    def of(self, kind: str) -> float:
        """The time that recording this kind once adds to a step; 0 if that is not known."""
        known = [cost for _, cost in self.measured.get(kind, ())]
        return _usual(known) if known else 0.0

    def length(self, kind: str, scale: float) -> float:
        """The time by which this kind may make a step longer. `scale`: of our time, how much is lost."""
        return max(scale * self.of(kind), self.lengths.get(kind, 0.0))

    def add(self, step: int, costs: Mapping[str, float], lengths: Mapping[str, float]) -> None:
        for kind, cost in costs.items():
            if kind in self.provisional:
                self.provisional.remove(kind)
                self.measured.pop(kind, None)
            if kind not in self.measured:
                self.has_news = True
                self.lengths.pop(kind, None)
            self.measured.setdefault(kind, deque(maxlen=_KEPT)).append((step, cost))
        for kind, length in lengths.items():
            self.lengths[kind] = (self.lengths.get(kind, length) + length) / 2

    def add_first(self, kind: str, cost: float) -> None:
        """The first times are longer than later ones, but bound how much longer a step may become."""
        if kind not in self.measured:
            self.has_news = True
            self.lengths[kind] = min(cost, self.lengths.get(kind, cost))

    def make_provisional(self, step: int) -> None:
        """Costs of steps that recorded everything at once are too high, but all that is known yet."""
        for kind in list(self.measured):
            self.measured[kind] = deque([(step, self.of(kind))], maxlen=_KEPT)
        self.provisional = set(self.measured)

    def drop_old(self, step: int) -> None:
        for known in self.measured.values():
            while len(known) > _FEW and step - known[0][0] > _RECENT:
                known.popleft()


def _usual(costs: Sequence[float]) -> float:
    """The mean, not the median, since an occasional high cost is paid all the same. Only a single extreme value, such
    as compiling a kernel, is left out: with few records it would distort the mean for long.

    >>> _usual([1.0, 1.0, 3.0, 1.0, 900.0])
    1.5
    """
    limit = _FAR_OUT * statistics.median(costs)
    known = sorted(costs)
    for _ in range(max(1, len(known) // 16)):
        if len(known) > 1 and known[-1] > limit:
            known.pop()
    return statistics.fmean(known)
