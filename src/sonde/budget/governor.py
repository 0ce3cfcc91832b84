"""How often to record what, so that the cost stays within a budget. Pure arithmetic on measured times.

Two measurements are taken together. What our work takes by itself (host clock, GPU events) is known for each kind, but
says little about what a step loses by it: work may hide behind the model's, or wait for it. So steps that record
different things are compared: how much longer a step is, for each second of ours in it, is `scale`, known with an
uncertainty. Where every step would record the same, now and then one records nothing, so that there is a difference.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

KINDS: Final = ("grads", "optimizer", "activations", "inspect", "finite")
"""Parameters, updates and optimizer states are read together, and thinned together, as "optimizer"."""
MAX_GRADS_STRIDE: Final = 4
"""Gradients of every layer at least this often, whatever they cost."""
MAX_STRIDE: Final = 1000
_REVIEW_STEPS: Final = 50
_FIRST_REVIEWS: Final = (12, 20)
"""Steps before the first reviews: what the very first ones have seen is little, and soon to be corrected."""
_TRY_EVERY: Final = 4
"""Steps between two trials of a kind before the first review."""
_SHADOW_EVERY: Final = 20
_GRADS_SHARE: Final = 0.9
"""The part of the budget that gradients may use alone before they are thinned too."""
_KEPT: Final = 20
_RECENT: Final = 100
"""Costs of more steps ago are not believed any more, as long as there are a few others."""
_FEW: Final = 3
_MIN_PAIRS: Final = 8
_PAUSE: Final = 8
"""A step this many times as long as others is an evaluation or a checkpoint, and says nothing about either."""
_FAR_OUT: Final = 6
"""A cost this many times the usual one is no cost of every time."""
_OPENLY: Final = 0.5
"""What takes more of a step than this, such as a kernel that is compiled, hides behind nothing."""
_FIRST_STRIDE: Final = 25.0
"""The first review has seen little, and at an hour when everything is slow: nothing becomes rarer than this by it."""
_FADE: Final = 0.9
_MARGIN: Final = 0.15
"""A stride changes when it is wrong by more than this; measured times always waver a little."""


@dataclass(slots=True)
class Scale:
    """Seconds that a step is longer for each second of ours in it, from differences of neighbouring steps."""

    num: float = 0
    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0

    def fade(self) -> None:
        """What was long ago counts less: a run changes."""
        self.num, self._xx, self._xy, self._yy = (_FADE * v for v in (self.num, self._xx, self._xy, self._yy))

    def add(self, pairs: list[tuple[float, float]]) -> None:
        """(difference of our time, difference of step time) of some neighbours; outliers are left out."""
        usable = [(x, y) for x, y in pairs if x]
        if len(usable) < 2:
            return
        typical = statistics.median(abs(y) for _, y in usable)
        for x, y in usable:
            if abs(y) <= 6 * typical:
                self.num += 1
                self._xx, self._xy, self._yy = self._xx + x * x, self._xy + x * y, self._yy + y * y

    @property
    def value(self) -> float:
        return self._xy / self._xx if self._xx else 1.0

    @property
    def error(self) -> float | None:
        """Its standard error; None as long as there is too little to tell."""
        if self.num < _MIN_PAIRS or not self._xx:
            return None
        left_over = max(self._yy - self.value * self._xy, 0.0)
        return math.sqrt(left_over / (self.num - 1) / self._xx)

    @property
    def trusted(self) -> float:
        """The value as far as it is known: the less certain, the nearer to one."""
        if self.error is None:
            return 1.0
        weight = 1.0 / (1.0 + (self.error / 0.3) ** 2)
        return min(max(1.0 + weight * (self.value - 1.0), 0.25), 4.0)


@dataclass(slots=True)
class Change:
    """What a review has changed, and why."""

    strides: dict[str, float]
    reason: str


@dataclass(slots=True)
class Governor:
    """Says at each step which kinds may be recorded; the first `free_steps` steps are never thinned.

    >>> governor = Governor(budget=0.01, free_steps=0)
    >>> for step in range(200):
    ...     cost = 0.004 if governor.allows(step, "optimizer") else 0.0
    ...     change = governor.observe(step, {"optimizer": cost} if cost else {}, step_s=0.1 + cost)
    >>> round(governor.stride("optimizer"))
    4
    """

    budget: float | None
    free_steps: int
    strides: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    scale: Scale = field(default_factory=Scale)
    pressure: float = 1.0
    """How much more than the budget alone asks is thinned, because memory is short; infinite: only gradients."""
    _step: int = field(default=-1, init=False)
    _decided: dict[str, bool] = field(default_factory=dict, init=False)
    _phase: dict[str, float] = field(default_factory=dict, init=False)
    _costs: dict[str, deque[tuple[int, float]]] = field(default_factory=dict, init=False)
    """At which step, and what it cost."""
    _wanted: dict[str, int] = field(default_factory=dict, init=False)
    _window: list[tuple[float, float]] = field(default_factory=list, init=False)
    _host_s: float = field(default=0.0, init=False)
    _gpu_s: float = field(default=0.0, init=False)
    total_s: float = field(default=0.0, init=False)
    """Of all steps that count."""
    _num_reviews: int = field(default=0, init=False)
    """Since the budget applies."""
    _tried_at: dict[str, int] = field(default_factory=dict, init=False)
    _trial: int = field(default=-1, init=False)
    """The step of the last trial."""
    _lost_s: float = field(default=0.0, init=False)
    _unsure_s: float = field(default=0.0, init=False)
    """Twice the standard error of what is lost."""
    _unsettled_s: float = field(default=0.0, init=False)
    """Of our own time, what is not in `_lost_s` yet."""
    _is_paired: bool = field(default=False, init=False)
    _base_s: float = field(default=0.0, init=False)
    _num_pauses: int = field(default=0, init=False)
    """In a row."""
    _largest: float = field(default=float(MAX_STRIDE), init=False)
    _shares: dict[str, float] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------------------------------------------ what is recorded

    def stride(self, kind: str) -> float:
        return self.strides.get(kind, 1.0)

    def allows(self, step: int, kind: str, *, scheduled: bool = True) -> bool:
        """Whether this kind may be recorded at this step. Asked again for the same step, it says the same."""
        if not scheduled:
            return False
        if step != self._step:
            self._step = step
            self._decided = {}
        if kind not in self._decided:
            self._decided[kind] = self._decide(step, kind)
        return self._decided[kind]

    def _decide(self, step: int, kind: str) -> bool:
        self._wanted[kind] = self._wanted.get(kind, 0) + 1
        if kind != "grads" and math.isinf(self.pressure):
            return False
        if self.budget is None or step < self.free_steps:
            return True
        if self.is_shadow(step) or self._is_waiting(step, kind):
            return False
        self._phase[kind] = self._phase.get(kind, self.stride(kind)) + 1.0
        if self._phase[kind] < self.stride(kind):
            return False
        self._phase[kind] -= self.stride(kind)
        self._phase[kind] = min(self._phase[kind], 1.0)
        return True

    def _is_waiting(self, step: int, kind: str) -> bool:
        """Before the first review a few times are enough to know what something costs. After the very first, each kind
        is tried by itself: together they would wait for one another, as they will not when they are rare."""
        if self._num_reviews or kind == "grads":
            return False
        if kind in self._tried_at:
            if step == self._trial or step - self._tried_at[kind] < _TRY_EVERY:
                return True
            self._trial = step
        self._tried_at[kind] = step
        return False

    def is_shadow(self, step: int) -> bool:
        """Whether this step records nothing, to be compared with the others: where gradients are in every one."""
        return (
            self.budget is not None
            and step >= self.free_steps
            and self.stride("grads") <= 1.0
            and step % _SHADOW_EVERY == _SHADOW_EVERY - 1
        )

    # ------------------------------------------------------------------------------------------------ what it took

    def observe(
        self,
        step: int,
        costs: Mapping[str, float],
        *,
        step_s: float,
        host_s: float | None = None,
        gpu_s: float = 0.0,
    ) -> Change | None:
        """Take one step's times in: what each kind took that was recorded. A change of strides, when there is one."""
        own_s = sum(costs.values())
        base_s = self._base_s or _base_of(self._window)
        if base_s and step_s - own_s > _PAUSE * base_s:
            self._num_pauses += 1
            if self._num_pauses <= _FEW:
                return None
            self._base_s, self._window = 0.0, []  # these are no pauses: from now on steps are this long
        self._num_pauses = 0
        if own_s > _OPENLY * step_s:
            self._lost_s += min(own_s, step_s)
        else:
            self._unsettled_s += own_s
        self._host_s += own_s if host_s is None else host_s
        self._gpu_s += gpu_s
        self.total_s += step_s
        for kind, cost in costs.items():
            self._costs.setdefault(kind, deque(maxlen=_KEPT)).append((step, cost))
        if "optimizer" in costs:
            self._is_paired = "grads" not in costs
        self._window.append((own_s, step_s))
        due = _FIRST_REVIEWS[self._num_reviews] if self._num_reviews < len(_FIRST_REVIEWS) else _REVIEW_STEPS
        return self._review(step) if len(self._window) >= due else None

    def begin(self, step: int) -> None:
        """From this step on there is a budget to keep. What was recorded all together before says little about it."""
        self._settle()
        self.scale, self._window, self._wanted, self._costs, self._num_reviews = Scale(), [], {}, {}, 0
        self._tried_at = dict.fromkeys(KINDS, step - _TRY_EVERY)

    def press(self, pressure: float) -> Change | None:
        """Memory is short, or no longer so."""
        if pressure == self.pressure:
            return None
        self.pressure = pressure
        return self._set_strides("memory is short" if pressure > 1 else "memory is no longer short")

    @property
    def overhead(self) -> float:
        """Share of all time so far that a step was longer by, as far as is known."""
        return min(max(self.lost_s / self.total_s, 0.0), 1.0) if self.total_s else 0.0

    @property
    def lost_s(self) -> float:
        """By how much all steps together were longer, as far as is known."""
        return self._lost_s + self.scale.trusted * self._unsettled_s

    @property
    def uncertainty(self) -> float | None:
        """Of the overhead, twice its standard error; None where no steps could be compared."""
        error = self.scale.error
        if not self.total_s or (error is None and not self._unsure_s):
            return None
        return (self._unsure_s + _twice(error) * self._unsettled_s) / self.total_s

    def facts(self) -> dict[str, object]:
        """What the run's document says about its cost."""
        total_s = self.total_s or 1.0
        return {
            "fraction": self.overhead,
            "uncertainty": self.uncertainty,
            "host_fraction": min(self._host_s / total_s, 1.0),
            "gpu_fraction": min(self._gpu_s / total_s, 1.0),
            "stride": {kind: round(stride, 2) for kind, stride in self.strides.items()},
        }

    # ------------------------------------------------------------------------------------------------ what follows

    def _settle(self) -> None:
        """What was lost so far is told by the scale of its time, as soon as that is known."""
        if self.scale.error is not None:
            self._lost_s += self.scale.trusted * self._unsettled_s
            self._unsure_s += _twice(self.scale.error) * self._unsettled_s
            self._unsettled_s = 0.0

    def _review(self, step: int) -> Change | None:
        window, self._window = self._window, []
        self._largest = float(MAX_STRIDE) if self._num_reviews else _FIRST_STRIDE
        if self._num_reviews:  # before, everything was slow: memory was made, kernels were compiled
            self.scale.fade()
            self.scale.add([(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(window)])
        self._settle()
        self._num_reviews += 1
        for known in self._costs.values():
            while len(known) > _FEW and step - known[0][0] > _RECENT:
                known.popleft()
        self._base_s = _base_of(window)
        self._shares = {kind: num / len(window) for kind, num in self._wanted.items()}
        self._wanted = {}
        if self.budget is None or step < self.free_steps:
            return None
        return self._set_strides(f"to keep within the budget of {self.budget:.1%}")

    def _set_strides(self, reason: str) -> Change | None:
        wanted = self._wanted_strides()
        is_new = any(
            max(new, self.strides[kind]) > (1 + _MARGIN) * min(new, self.strides[kind]) for kind, new in wanted.items()
        )
        if not is_new:
            return None
        self.strides.update(wanted)
        return Change(dict(self.strides), reason)

    def _wanted_strides(self) -> dict[str, float]:
        """Gradients as often as they fit; the others, alike, with what is left."""
        if self.budget is None or not self._base_s:
            return {kind: min(self.pressure, float(MAX_STRIDE)) if kind != "grads" else 1.0 for kind in self.strides}
        allowed_s = self.budget * self._base_s
        cost = {kind: self.scale.trusted * self._cost(kind) * min(self._shares.get(kind, 0.0), 1.0) for kind in KINDS}
        grads = 1.0
        while cost["grads"] / grads > _GRADS_SHARE * allowed_s and grads < MAX_GRADS_STRIDE:
            grads *= 2
        if sum(cost.values()) <= allowed_s:
            grads = 1.0
        others_s = sum(cost.values()) - cost["grads"]
        left_s = allowed_s - cost["grads"] / grads
        others = others_s / left_s if left_s > 0 else float(MAX_STRIDE)
        others = min(max(others, 1.0), self._largest) * self.pressure
        others = min(others, float(MAX_STRIDE))
        return {kind: grads if kind == "grads" else others for kind in self.strides}

    def _cost(self, kind: str) -> float:
        """What recording this kind once adds to a step."""
        known = [cost for _, cost in self._costs.get(kind, ())]
        if not known:
            return 0.0
        if kind == "optimizer" and self._is_paired:
            # They are read together, so that gradients come with it: only the rest is added.
            return max(_usual(known) - self._cost("grads"), 0.0)
        return _usual(known)


def _base_of(window: Sequence[tuple[float, float]]) -> float:
    """What a step takes without us; 0 where too few were seen to tell."""
    return statistics.median(step_s - min(own_s, step_s) for own_s, step_s in window) if len(window) >= _FEW else 0.0


def _usual(costs: Sequence[float]) -> float:
    """The mean, not the median: what is dear now and then is paid for all the same. Only the odd one that is far out,
    such as a kernel that is compiled, is left out: where little is recorded it would be believed for long.

    >>> _usual([1.0, 1.0, 3.0, 1.0, 900.0])
    1.5
    """
    limit = _FAR_OUT * statistics.median(costs)
    known = sorted(costs)
    for _ in range(max(1, len(known) // 16)):
        if len(known) > 1 and known[-1] > limit:
            known.pop()
    return statistics.fmean(known)


def _twice(error: float | None) -> float:
    """Twice a standard error of the scale; it is not off by more than all of our time."""
    return 1.0 if error is None else min(2 * error, 1.0)
