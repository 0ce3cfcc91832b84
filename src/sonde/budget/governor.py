"""Decides what each step may record, so that what recording adds to the run stays within the allowance of `Ledger`.

While more than half of the seconds is left, everything is recorded as scheduled. After that each kind has a stride, and
what would make a single step much longer is spread over several. Strides follow from two measurements. The time of our
work (host clock, GPU events) is known for each kind, but says little about how much longer a step takes: it may overlap
with the model's work, or wait for it. So steps that record different things are compared (`Scale`), and steps that are
followed with those at rest (`Contrast`). If every step would record the same, now and then two steps rest, for
comparison.

Pure arithmetic on measured times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from sonde.budget.contrast import Contrast
from sonde.budget.costs import Costs
from sonde.budget.ledger import Ledger
from sonde.budget.scale import Scale
from sonde.budget.strides import COME_FIRST, KINDS, MAX_STRIDE, differ, shared_strides

IN_PAIRS: Final = "scalars"
"""Recorded at two successive steps at a time: the direction of the gradient is compared with that of the step
before."""
_ALIGNED: Final = frozenset({"grads", "optimizer"})
IN_PARTS: Final = ("activations", "inspect")
"""Kinds that may record some modules at one step and the others at later ones."""
MAX_PARTS: Final = 64
_REVIEW_STEPS: Final = 50
_REVIEW_S: Final = (0.25, 30.0)
"""A review comes after 50 steps and this time, or after 10 steps and this longer time."""
_FIRST_REVIEWS: Final = (12, 20)
"""Steps before the first reviews: they have seen little, and are soon corrected."""
_HORIZON: Final = (100, 1.5)
"""Steps and seconds, whichever takes longer, over which unused time is spent."""
_LONGER: Final = (0.25, 0.002)
"""A step may become longer by this fraction, or by this time in seconds."""
_TRY_EVERY: Final = (4, 20)
"""Steps between two trials of a kind whose cost is not known, and if more was spent than allowed."""
_MAX_TRIALS: Final = 6
_SHADOW: Final = (40, 2)
"""The first number of steps contains the second number that only count. A single one could not rest."""
_LOOK_AHEAD: Final = 200
"""Steps that may be left to counting at a time."""
_SOON: Final = 0.2
"""What is due within this fraction of its stride is recorded together with what is due now, in a step that is followed
anyway."""
_LEAST_SHARE: Final = 0.3
"""The fraction of the budget that is used for recording even if more was spent than allowed: a run without records
would be worth nothing, and the rest pays back."""
_BARE_STEPS: Final = frozenset({4, 9, 19, 39, 79, 159, 319, 639})
_FEW: Final = 3
_PAUSE: Final = 8
"""Ratio to other steps above which a step is an evaluation or a checkpoint, and does not count."""
_OPENLY: Final = 0.5
"""Work that takes more of a step than this, such as compiling a kernel, overlaps with nothing."""
_MARGIN: Final = 0.15
"""A stride changes when it is wrong by more than this; measured times always vary a little."""
_WORTH_TELLING: Final = 1.0
"""A change of a stride by more than this is recorded as an event, unless there was one lately."""
_TELL_AGAIN: Final = 1.1
_UNKNOWN_PAUSE_S: Final = 60.0
_FIRST: Final = ("scalars", "grads")
"""Kinds that are thinned last."""


@dataclass(slots=True)
class Change:
    """The strides after a review, and the reason for the change."""

    strides: dict[str, float]
    reason: str


@dataclass(slots=True)
class Seen:
    """One observed step: our time, and all of its time."""

    step: int
    own_s: float
    step_s: float


@dataclass(slots=True)
class Governor:
    """Decides for one training thread; several may share a ledger.

    >>> ledger = Ledger(0.01, seconds=0.0)
    >>> governor = Governor(ledger)
    >>> governor.is_dense, governor.allows(0, "optimizer")
    (False, True)
    """

    ledger: Ledger
    strides: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    """Steps between two records of a kind; of one part of it, if it is recorded in parts."""
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 1))
    scale: Scale = field(default_factory=Scale)
    is_aligned: bool = False
    """Whether gradients and parameters are recorded at multiples of a power of two only. Ranks that hold parts of one
    tensor measure different times, and nothing is sent between them: so the steps of the slowest are steps of all."""
    pressure: float = 1.0
    """Extra factor of thinning because memory is low; infinite: only gradients."""
    is_dense: bool = field(init=False)
    """Whether everything is recorded as scheduled, because enough of the seconds is left."""
    version: int = field(default=0, init=False)
    """Changes whenever a kind may be due earlier than it was."""
    total_s: float = field(default=0.0, init=False)
    """Total time of all steps that count."""
    _step: int = field(default=-1, init=False)
    _decided: dict[str, bool] = field(default_factory=dict, init=False)
    _planned_s: float = field(default=0.0, init=False)
    """Time of the kinds that this step records in addition to scalars and gradients."""
    _due: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0), init=False)
    _told: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0), init=False)
    """The strides of the last change that was recorded as an event, and its step."""
    _told_at: int = field(default=0, init=False)
    _recorded_at: dict[str, int] = field(default_factory=dict, init=False)
    _num_recorded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0), init=False)
    _turns: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)
    _shares: dict[str, float] = field(default_factory=dict, init=False)
    _num_trials: dict[str, int] = field(default_factory=dict, init=False)
    _tried_at: dict[str, int] = field(default_factory=dict, init=False)
    contrast: Contrast = field(default_factory=Contrast, init=False)
    costs: Costs = field(default_factory=Costs, init=False)
    _window: list[Seen] = field(default_factory=list, init=False)
    _num_seen: int = field(default=0, init=False)
    """Steps since the last review, and their time."""
    _seen_s: float = field(default=0.0, init=False)
    _other_s: float = field(default=0.0, init=False)
    """Our time in these steps that belongs to no kind."""
    _num_reviews: int = field(default=0, init=False)
    """Reviews since the budget applies."""
    _host_s: float = field(default=0.0, init=False)
    _gpu_s: float = field(default=0.0, init=False)
    _lost_s: float = field(default=0.0, init=False)
    _unsure_s: float = field(default=0.0, init=False)
    """Twice the standard error of the lost time."""
    _unsettled_s: float = field(default=0.0, init=False)
    """Our own time that is not in `_lost_s` yet."""
    _base_s: float = field(default=0.0, init=False)
    _fixed_s: float = field(default=0.0, init=False)
    """Our time in every step, whether it records or not."""
    _num_pauses: int = field(default=0, init=False)
    """Consecutive pauses."""
    is_compared: bool = field(default=False, init=False)
    """Whether a few of the first steps record nothing, to be compared with: on a device, where the time of our work
    does not say how much longer a step takes."""
    _first_step: int = field(default=-1, init=False)
    _bare_s: float = field(default=0.0, init=False)
    """The shortest of these steps."""
    _dense: list[tuple[float, float]] = field(default_factory=list, init=False)
    """(time counted as ours, time) of the steps that recorded everything."""
    _excess_s: float = field(default=0.0, init=False)
    """Time by which these steps were longer than was counted."""

    def __post_init__(self) -> None:
        self.ledger.accounts.append(self)
        self.is_dense = self.ledger.is_ample

    # -------------------------------------------------------------------------------------------------------- decisions

    def stride(self, kind: str) -> float:
        return self.strides.get(kind, 1.0)

    def want(self, kind: str, share: float) -> None:
        """This kind is scheduled in this fraction of all steps."""
        self._shares[kind] = max(share, self._shares.get(kind, 0.0))

    def allows(self, step: int, kind: str) -> bool:
        """Whether this kind may be recorded at this step. Repeated calls for the same step agree."""
        return kind in self.choose(step, (kind,))

    def choose(self, step: int, scheduled: Collection[str]) -> set[str]:
        """The scheduled kinds that may be recorded at this step. Repeated calls for the same step agree."""
        if step != self._step:
            self._step, self._planned_s = step, 0.0
            self._decided.clear()
        new = [kind for kind in scheduled if kind not in self._decided]
        for kind in sorted(new, key=self._priority) if len(new) > 1 else new:
            self._decided[kind] = self._decide(step, kind)
        if self._decided.get("optimizer") and self._decided.get("grads") is False and self._is_known("grads"):
            self._decided["grads"] = True  # an update is compared with its gradient
            self._due["grads"] = step + self.stride("grads")
            self._note(step, "grads")
        return {kind for kind in scheduled if self._decided[kind]}

    def _priority(self, kind: str) -> float:
        """Scalars and gradients first, then what has waited longest."""
        return -1.0 if kind in _FIRST else self._due[kind]

    def quiet_until(self, kinds: Collection[str]) -> int:
        """No step before this one may record any of these kinds, unless `version` changes."""
        if self._is_unlimited or not all(map(self._is_known, kinds)):
            return -1
        return min((math.ceil(self._due[kind]) for kind in kinds), default=-1)

    def next_recorded(self, after: int, schedules: Iterable[tuple[str, Callable[[int], bool]]]) -> int:
        """The first step after this one that may record something, as far ahead as can be said. `schedules`: when each
        kind is scheduled."""
        found = after + 1 + _LOOK_AHEAD
        for kind, is_scheduled in schedules:
            due = max(self.quiet_until((kind,)), after + 1)
            may_record = (step for step in range(due, found) if is_scheduled(step) and not self.is_shadow(step))
            found = min(found, next(may_record, found))
            if found == after + 1:
                break
        return found

    def turn(self, kind: str) -> tuple[int, int]:
        """(number, parts): which part of the modules the current step records; all of them are 0 of 1."""
        return self._turns.get(kind, (0, 1))

    @property
    def _is_limited(self) -> bool:
        """Whether the budget applies."""
        return self.ledger.fraction is not None and not self.is_dense

    @property
    def _is_unlimited(self) -> bool:
        return self.pressure == 1.0 and not self._is_limited

    def _decide(self, step: int, kind: str) -> bool:
        if kind not in _FIRST and math.isinf(self.pressure):
            return False
        if self.is_bare(step):
            return False
        if self._is_unlimited:
            self._turns[kind] = 0, 1
            return True
        if self.is_shadow(step):
            return False
        if self._is_limited and not self._is_known(kind):
            return self._is_trial(step, kind)
        if self.is_aligned and kind in _ALIGNED:
            return self._decide_aligned(step, kind)
        if step < self._due[kind] - self._soon(kind) or (self._is_limited and not self._fits(kind)):
            return False
        self._due[kind] = self._next_due(step, kind)
        self._note(step, kind)
        return True

    def _decide_aligned(self, step: int, kind: str) -> bool:
        every = 1 << max(math.ceil(math.log2(self.stride(kind))), 0)
        self._due[kind] = float(step - step % every + every)
        if step % every:
            return False
        self._note(step, kind)
        return True

    def _soon(self, kind: str) -> float:
        """The number of steps by which this kind may be early, in order to share a step with others."""
        is_shared = self.contrast.hidden_s > 0 and any(self._decided.values())
        return _SOON * self.stride(kind) if is_shared and kind != "grads" else 0.0  # gradients have a longest gap

    def _next_due(self, step: int, kind: str) -> float:
        stride = self.stride(kind)
        if kind == IN_PAIRS and stride > 1:
            return step + 1.0 if self._recorded_at.get(kind) != step - 1 else step - 1 + 2 * stride
        return max(self._due[kind], step - stride) + stride

    def _note(self, step: int, kind: str) -> None:
        parts = self.parts[kind]
        self._recorded_at[kind] = step
        self._turns[kind] = self._num_recorded[kind] % parts, parts
        self._num_recorded[kind] += 1

    def _fits(self, kind: str) -> bool:
        """Whether the step does not become too long. What does not fit waits for another step."""
        if kind in _FIRST:
            return True
        cost_s = self.costs.length(kind, self.scale.trusted) / self.parts[kind]
        if self._planned_s and self._planned_s + cost_s > self.bound_s:
            return False
        self._planned_s += cost_s
        return True

    def _is_known(self, kind: str) -> bool:
        return self.costs.is_measured(kind) or self._num_trials.get(kind, 0) >= _MAX_TRIALS

    def _is_trial(self, step: int, kind: str) -> bool:
        """A few times are enough to know what something costs; one kind at a time, since together they would wait for
        one another, which they will not do when they are rare."""
        apart = _TRY_EVERY[0] if self.ledger.remaining_s > 0 else _TRY_EVERY[1]
        if kind in self._tried_at and (self._planned_s or step - self._tried_at[kind] < apart):
            return False
        self._tried_at[kind] = step
        self._planned_s = math.inf
        self._num_trials[kind] = self._num_trials.get(kind, 0) + 1
        self._note(step, kind)
        return True

    def is_shadow(self, step: int) -> bool:
        """Whether this step records nothing, for comparison with the others: if gradients are recorded at every
        step."""
        every, num = _SHADOW
        return self._is_limited and self.stride("grads") <= 1.0 and step % every >= every - num

    def is_bare(self, step: int) -> bool:
        """Whether this is one of the few steps that record nothing although everything may be recorded."""
        if self._first_step < 0:
            self._first_step = step
        return (
            self.is_compared
            and self.is_dense
            and self.ledger.fraction is not None
            and step - self._first_step in _BARE_STEPS
        )

    @property
    def bound_s(self) -> float:
        """How much longer recording may make a single step."""
        return max(_LONGER[0] * self._base_s, _LONGER[1])

    # ----------------------------------------------------------------------------------------------------- measurements

    def observe(
        self,
        step: int,
        costs: Mapping[str, float],
        *,
        step_s: float,
        lengths: Mapping[str, float] | None = None,
        other_s: float = 0.0,
        host_s: float | None = None,
        gpu_s: float = 0.0,
        is_first: bool = False,
        is_exact: bool = True,
    ) -> Change | None:
        """Process one step's times: the cost of each recorded kind, and our time that belongs to none. `lengths`: what
        the kinds would cost if nothing overlapped with other work, where that is more. `is_first`: some
        of it happens once only, such as compiling a kernel. `is_exact`: `step_s` may be compared with the next
        step's. Returns a change of strides, if there is one."""
        own_s = sum(costs.values())
        base_s = self._base_s or _base_of(self._window)
        self.ledger.pass_time(_PAUSE * base_s if base_s else _UNKNOWN_PAUSE_S)
        self._host_s += own_s + other_s if host_s is None else host_s
        self._gpu_s += gpu_s
        self._lost_s += other_s
        if is_first:
            self._lost_s += own_s
            self._learn_first(costs, step_s - own_s)
            return self._after(step, costs)
        if base_s and step_s - own_s > _PAUSE * base_s:
            self._num_pauses += 1
            if self._num_pauses <= _FEW:
                self._lost_s += own_s
                return self._after(step, costs)
            self.contrast.changed()
            self._base_s, self._window = 0.0, []  # not pauses after all: from now on steps are this long
        self._num_pauses = 0
        if self.is_dense and self.is_compared:
            self._compare(own_s + other_s, step_s, is_bare=not costs)
        else:
            is_clear = is_exact and own_s <= _OPENLY * step_s
            self.contrast.followed(step_s - self.scale.trusted * own_s - other_s if is_clear else None)
        if own_s > _OPENLY * step_s:
            self._lost_s += min(own_s, step_s)
        else:
            self._unsettled_s += own_s
        self.total_s += step_s
        self._num_seen += 1
        self._seen_s += step_s
        self._other_s += other_s
        if costs:
            self.costs.add(step, self._whole(costs), self._whole(lengths or {}))
        if is_exact:
            self._window.append(Seen(step, own_s, step_s))
        return self._after(step, costs)

    def _compare(self, counted_s: float, step_s: float, *, is_bare: bool) -> None:
        """Count what makes a step longer than a bare one, whatever it is: hooks, waiting for the interpreter."""
        if is_bare:
            self._bare_s = min(step_s, self._bare_s or step_s)
            self._excess_s = sum(max(one_s - self._bare_s - known_s, 0.0) for known_s, one_s in self._dense)
            return
        self._dense.append((counted_s, step_s))
        if self._bare_s:
            self._excess_s += max(step_s - self._bare_s - counted_s, 0.0)

    def pass_by(self, step: int, step_s: float, other_s: float) -> Change | None:
        """Process a step that recorded nothing, and that no other is compared with."""
        if not 0 < step_s <= _PAUSE * self._base_s:
            return self.observe(step, {}, step_s=step_s, other_s=other_s, is_exact=not self._base_s)
        self.contrast.followed(None)
        self.ledger.pass_time(_PAUSE * self._base_s)
        self._host_s += other_s
        self._lost_s += other_s
        self._other_s += other_s
        self.total_s += step_s
        self._seen_s += step_s
        self._num_seen += 1
        return self._review(step) if self._num_seen >= _REVIEW_STEPS and self._is_review_due() else None

    def rested(self, step: int, num_steps: int, seconds: float, other_s: float) -> Change | None:
        """Process steps that were only counted, the last of which was `step`."""
        seconds = min(seconds, _PAUSE * self._base_s * num_steps) if self._base_s else seconds
        self.ledger.pass_time(seconds)
        self._host_s += other_s
        self._lost_s += other_s
        self._other_s += other_s
        self.total_s += seconds
        self._seen_s += seconds
        self._num_seen += num_steps
        return self._review(step) if self._num_seen >= _REVIEW_STEPS and self._is_review_due() else None

    def compare_rest(self, step: int, step_s: float) -> None:
        """The steps of a rest, the last of which was `step`, took this long on average, by the clock that times the
        other steps."""
        if self._base_s and step_s > _PAUSE * self._base_s:
            return
        self.contrast.rested(step_s)
        self._window.append(Seen(step, 0.0, step_s + self.contrast.hidden_s))

    def _whole(self, times: Mapping[str, float]) -> dict[str, float]:
        """The times of all parts of each kind, from those of the parts that were recorded."""
        return {kind: time_s * self.turn(kind)[1] for kind, time_s in times.items()}

    def _learn_first(self, costs: Mapping[str, float], rest_s: float) -> None:
        """The first times are longer than later ones. They say into how many parts to divide what can be divided."""
        if not self._num_seen and rest_s > 0:
            self._base_s = min(self._base_s or rest_s, rest_s)
        for kind, whole_s in self._whole(costs).items():
            if kind in IN_PARTS:
                self.costs.add_first(kind, whole_s)

    def _after(self, step: int, costs: Mapping[str, float]) -> Change | None:
        if self.is_dense:
            if self._num_seen >= _REVIEW_STEPS:
                self._look(self._window)
                self._window = self._window[-_FEW:]
            return self._begin(step) if costs and not self.ledger.is_ample else None
        if self._is_review_due():
            return self._review(step)
        return self._set_strides(step, self._reason) if self.costs.has_news and self._is_base_known() else None

    def _is_base_known(self) -> bool:
        self._base_s = self._base_s or _base_of(self._window)
        return self._base_s > 0 and self.ledger.fraction is not None

    def _is_review_due(self) -> bool:
        if self._num_reviews < len(_FIRST_REVIEWS):
            return self._num_seen >= _FIRST_REVIEWS[self._num_reviews]
        if self._num_seen < _REVIEW_STEPS:
            return self._seen_s > _REVIEW_S[1] and self._num_seen >= _REVIEW_STEPS / 5
        return self._seen_s > _REVIEW_S[0]

    def _begin(self, step: int) -> Change | None:
        """Half of the seconds is used up."""
        self.is_dense = False
        self._look(self._window)
        self.costs.make_provisional(step)
        self._tried_at = dict.fromkeys(KINDS, step)
        self.scale, self._window, self._num_reviews = Scale(), [], 0
        if self.ledger.fraction is None:
            return None
        return self._set_strides(step, self._reason)

    def restart(self, step: int) -> None:
        """Training returned to this step: everything is due."""
        self._due = dict.fromkeys(KINDS, float(step))
        self._recorded_at, self._tried_at, self._step = {}, {}, -1
        self.version += 1

    def press(self, pressure: float) -> Change | None:
        """Set the pressure of low memory."""
        if pressure == self.pressure:
            return None
        self.pressure, self._told_at = pressure, 0
        return self._set_strides(self._step, f"because memory is {'' if pressure > 1 else 'no longer '}low")

    @property
    def lost_s(self) -> float:
        """Total time that recording has added to all steps, as far as it is known."""
        return self._lost_s + self.scale.trusted * self._unsettled_s + self._excess_s + self.contrast.total_s

    @property
    def unsure_s(self) -> float | None:
        """Twice the standard error of the lost time; None if no steps could be compared."""
        error = self.scale.error
        if error is None and not self._unsure_s:
            return None
        return self._unsure_s + _twice(error) * self._unsettled_s

    def facts(self) -> dict[str, object]:
        """Strides and our own time, for run.json."""
        return {
            "host_s": self._host_s,
            "gpu_s": self._gpu_s,
            "stride": {kind: round(stride, 2) for kind, stride in self.strides.items()},
            "parts": {kind: parts for kind, parts in self.parts.items() if parts > 1},
        }

    # ---------------------------------------------------------------------------------------------------------- reviews

    @property
    def _reason(self) -> str:
        return f"to stay within the budget of {self.ledger.seconds:g} s plus {100 * (self.ledger.fraction or 0):g} %"

    def _settle(self) -> None:
        """Convert our time into lost time with the scale, as soon as that is known."""
        if self.scale.error is not None:
            self._lost_s += self.scale.trusted * self._unsettled_s
            self._unsure_s += _twice(self.scale.error) * self._unsettled_s
            self._unsettled_s = 0.0

    def _review(self, step: int) -> Change | None:
        window, self._window = self._window, []
        if self._num_reviews:  # earlier steps were slow: memory was allocated, kernels were compiled
            self.scale.fade()
            pairs = [(b.own_s - a.own_s, b.step_s - a.step_s) for a, b in pairwise(window) if b.step == a.step + 1]
            self.scale.add(pairs)
        self._settle()
        self.contrast.settle()
        self._num_reviews += 1
        self.costs.drop_old(step)
        self._look(window)
        return self._set_strides(step, self._reason) if self.ledger.fraction is not None else None

    def _look(self, window: Sequence[Seen]) -> None:
        """The time of a step without recording, and our time in every step."""
        if self._num_seen:
            usual_s = self._seen_s / self._num_seen if not window else self._base_s
            known = [base_s for base_s in (self.contrast.bare_s, _base_of(window)) if base_s]
            self._base_s = min(known, default=usual_s)
            self._fixed_s = self._other_s / self._num_seen
        self._num_seen, self._seen_s, self._other_s = 0, 0.0, 0.0

    def _set_strides(self, step: int, reason: str) -> Change | None:
        self.costs.has_news = False
        self._set_parts()
        wanted = self._wanted_strides()
        if not differ(wanted, self.strides, _MARGIN):
            return None
        for kind, stride in wanted.items():
            self.strides[kind] = stride
            self._due[kind] = self._recorded_at.get(kind, step - MAX_STRIDE) + stride
        self.version += 1
        if step < self._told_at * _TELL_AGAIN or not differ(self.strides, self._told, _WORTH_TELLING):
            return None
        self._told, self._told_at = dict(self.strides), step
        return Change(dict(self.strides), reason)

    def _set_parts(self) -> None:
        """As many parts that none of them makes a step much longer; fewer again if half as many would do."""
        if not self._is_limited or not self._base_s:
            return
        for kind in IN_PARTS:
            needed = math.ceil(self.costs.length(kind, self.scale.trusted) / self.bound_s)
            if needed > self.parts[kind] or 2 * needed <= self.parts[kind]:
                self.parts[kind] = min(max(needed, 1), MAX_PARTS)

    def _wanted_strides(self) -> dict[str, float]:
        """Gradients as often as they fit; the other kinds share the rest, each in proportion to its schedule."""
        if not self._is_limited or not self._base_s:
            return self._all_strides()
        hidden_s = self.contrast.hidden_s
        allowed_s = self._allowed_s()
        always = self._shared_strides(allowed_s - hidden_s, 0.0) if hidden_s < allowed_s else None
        apart = self._shared_strides(allowed_s, hidden_s) if hidden_s or always is None else None
        if always is None or apart is None:
            return always or apart or {}
        return always if always["grads"] <= apart["grads"] else apart

    def _shared_strides(self, allowed_s: float, each_s: float) -> dict[str, float]:
        """The strides at which all kinds together take this time per step. `each_s`: what each record costs on top,
        because the step has to be followed for it; 0 if every step is followed."""
        cost = {kind: self.scale.trusted * self.costs.of(kind) + each_s * self._num_apart(kind) for kind in KINDS}
        share = {kind: self._shares.get(kind, 1.0) or 1.0 for kind in KINDS}
        found = shared_strides(cost, share, self.parts, allowed_s)
        if found is None:
            return self._all_strides()
        return {kind: stride if kind in COME_FIRST else self._pressed(stride) for kind, stride in found.items()}

    def _all_strides(self) -> dict[str, float]:
        """The strides if the budget allows everything: less only if memory is low."""
        return {kind: 1.0 if kind in _FIRST else self._pressed(1.0) for kind in KINDS}

    def _num_apart(self, kind: str) -> int:
        """The number of steps in which all parts of a kind are recorded; 0 for a kind that is never recorded."""
        return self.parts[kind] if kind in self.costs.measured else 0

    def _pressed(self, stride: float) -> float:
        return min(max(stride, 1.0) * self.pressure, float(MAX_STRIDE))

    def _allowed_s(self) -> float:
        """The time that kinds may take per step: the budget, what was saved up over some time, and less if the reserve
        was used."""
        assert self.ledger.fraction is not None
        budget_s, remaining_s = self.ledger.fraction * self._base_s, self.ledger.remaining_s
        saved_s = remaining_s - self.ledger.reserve_s
        if saved_s >= 0:
            allowed_s = budget_s + saved_s / max(_HORIZON[0], _HORIZON[1] / self._base_s)
        else:
            allowed_s = budget_s * max(remaining_s, 0.0) / self.ledger.reserve_s
        return max(allowed_s - self._fixed_s, _LEAST_SHARE * budget_s)


def _base_of(window: Sequence[Seen]) -> float:
    """The time of a step without recording; 0 if too few steps were seen."""
    return (
        statistics.median(seen.step_s - min(seen.own_s, seen.step_s) for seen in window) if len(window) >= _FEW else 0.0
    )


def _twice(error: float | None) -> float:
    """Twice a standard error of the scale, at most the whole of our time."""
    return 1.0 if error is None else min(2 * error, 1.0)
