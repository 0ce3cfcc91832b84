"""Budget control: passes measured times to the governor, and records its changes as events."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from sonde.budget.governor import Change, Governor
from sonde.budget.ledger import Ledger
from sonde.budget.memory import memory_shares
from sonde.budget.meter import Meter, StepTimes
from sonde.budget.strides import KINDS
from sonde.probe.schedule import Schedule
from sonde.session.recording import Recording

_LOOK_EVERY: Final = 50
"""Steps between two checks of memory."""
_LOOK_S: Final = 1.0
"""Seconds between them, at least."""
_EASE: Final = 0.05
"""Memory must be this much below the threshold before recording returns to normal."""
_FOLLOW: Final = 0.1
"""How fast the share of steps that wait for the host is followed."""
_STARTS: Final = 2
"""The number of times something must have been recorded before its cost counts."""
OF_KIND: Final = {
    "scalars": "scalars",
    "grad": "grads",
    "param": "optimizer",
    "update": "optimizer",
    "optim": "optimizer",
    "activations": "activations",
    "activation_grads": "activations",
    "inspect": "inspect",
    "finite": "finite",
}


class BudgetController:
    """The clocks and the recording schedule of one training thread."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.meter = recording, Meter()
        self.governor = Governor(recording.ledger)
        self.snapshots_s = 0.0
        """Time that snapshots took on the training thread; not part of the budget."""
        self._gpu_s: dict[str, float] = {}
        """GPU time of each kind when it was last measured."""
        self._num_seen: dict[str, int] = {}
        self._recorded_at = self._quiet_until = -1
        """The last step that recorded something, and the first that may do so again."""
        self._looked_s = -math.inf
        self.is_together = False
        """Whether all kinds are recorded together or not at all, as in a compiled step."""
        self.unknown = ""
        """Why the cost is not known; empty if it is."""

    def allows(self, step: int, kind: str, *, scheduled: bool = True) -> bool:
        return scheduled and self.governor.allows(step, OF_KIND[kind])

    def quiet_until(self, kinds: Collection[str]) -> int:
        """No step before this one may record any of these kinds, unless the governor's `version` changes."""
        self._quiet_until = self.governor.quiet_until(kinds)
        return self._quiet_until

    def next_recorded(self, after: int, schedules: Iterable[tuple[str, Schedule]]) -> int:
        """The first step after this one that may record something, as far ahead as can be said."""
        return self.governor.next_recorded(after, ((OF_KIND[name], schedule) for name, schedule in schedules))

    def rested(self, step: int, num_steps: int, seconds: float, own_s: float, *, is_plain: bool) -> None:
        """Steps that were only counted are over; the last of them was `step`. `is_plain`: nothing else took time."""
        self.meter.pass_by()
        if is_plain and num_steps > 0:
            if self.meter.device is None:
                self.governor.compare_rest(step, (seconds - own_s) / num_steps)
            else:
                self.meter.end_rest(step, num_steps)
        if num_steps > 0:
            change = self.governor.rested(step, num_steps, seconds, self._host_weight * own_s)
            if change is not None:
                self._tell(change)

    def end_step(self, step: int, wall_s: float) -> None:
        """Close the step, and process those that the device has finished since."""
        if step % _LOOK_EVERY == _LOOK_EVERY - 1:
            self._look_at_memory()
        if self.meter.is_recording:
            self._recorded_at = step
        elif self._recorded_at + 1 < step < self._quiet_until - 1:  # others are compared with one that records
            change = self.governor.pass_by(step, wall_s, self._host_weight * self.meter.pass_by())
            if change is not None:
                self._tell(change)
            return
        self.meter.end_step(step, wall_s)
        for times in self.meter.done():
            self._take(times)

    def restart(self, step: int) -> None:
        """Training returned to this step."""
        self.governor.restart(step)
        self._recorded_at = self._quiet_until = -1

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {**self.governor.facts(), "snapshots_s": round(self.snapshots_s, 4)}
        if self.is_together:
            facts |= {"stride": round(self.governor.stride("optimizer")), "is_together": True}
        return facts

    @property
    def _host_weight(self) -> float:
        """Host time overlaps with the GPU's work as long as the GPU has some; so does that of our threads."""
        return self.recording.ledger.thread_weight

    def _take(self, times: StepTimes) -> None:
        if times.num_rested:
            if times.is_exact:
                self.governor.compare_rest(times.step, times.step_s / times.num_rested)
            return
        self.snapshots_s += times.host_s.get("snapshots", 0.0)
        if times.host_s:
            self.unknown = ""
        self._gpu_s |= times.gpu_s or {}
        costs = {kind: self._cost(kind, times) for kind in times.host_s if kind != "snapshots"}
        if self.meter.device is not None:
            self.governor.is_compared = True
            ledger = self.recording.ledger
            ledger.thread_weight += _FOLLOW * (times.is_host_bound - ledger.thread_weight)
        change = self.governor.observe(
            times.step,
            costs,
            # A snapshot was requested and is never skipped for the budget, so it does not count as recording cost.
            step_s=max(times.step_s - times.host_s.get("snapshots", 0.0), 0.0),
            lengths=None if self.meter.device is None else {kind: times.host_s[kind] for kind in costs},
            other_s=self._host_weight * times.other_s,
            host_s=times.other_s + sum(seconds for kind, seconds in times.host_s.items() if kind != "snapshots"),
            gpu_s=sum(self._gpu_s.get(kind, 0.0) for kind in costs if kind in times.launched),
            is_first=self._is_first(times),
            is_exact=times.is_exact,
        )
        if change is not None:
            self._tell(change)

    def _is_first(self, times: StepTimes) -> bool:
        """Whether something in this step was new: then kernels were compiled and memory was allocated, once only."""
        new = [kind for kind in times.host_s if self._num_seen.get(kind, 0) < _STARTS]
        for kind in new:
            self._num_seen[kind] = self._num_seen.get(kind, 0) + 1
        return bool(new)

    def _cost(self, kind: str, times: StepTimes) -> float:
        """Host time overlaps with the GPU's work as long as the GPU has some."""
        host_s = times.host_s[kind]
        if self.meter.device is None:
            return host_s
        gpu_s = self._gpu_s.get(kind, 0.0) if kind in times.launched else 0.0
        return max(gpu_s, host_s) if times.is_host_bound else gpu_s

    def _look_at_memory(self) -> None:
        settings, now = self.recording.settings, time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        try:
            share = max(memory_shares(self.meter.device), default=0.0)
        except OSError as error:  # no file can be opened
            why = f"cannot read the memory use ({error}): recording is not reduced when memory runs low."
            self.recording.warn_once("memory", why)
            return
        ease = _EASE if self.governor.pressure > 1 else 0.0
        if share >= settings.memory_critical - (ease if math.isinf(self.governor.pressure) else 0.0):
            pressure = math.inf
        else:
            pressure = 4.0 if share >= settings.memory_high - ease else 1.0
        change = self.governor.press(pressure)
        if change is not None:
            self._tell(change, memory_share=share)

    def _tell(self, change: Change, **details: Any) -> None:
        often = ", ".join(f"{kind} {_often(change.strides[kind])}{self._in_parts(kind)}" for kind in KINDS)
        if self.is_together:
            often = f"one in {_number(change.strides['optimizer'])} of the steps that `when` selects"
        if math.isinf(self.governor.pressure):
            often = "nothing" if self.is_together else "gradients only"
        message = f"recording schedule changed {change.reason}: {often}"
        self.recording.event("cadence", message, details={**self.facts(), **details})

    def _in_parts(self, kind: str) -> str:
        parts = self.governor.parts[kind]
        return f" (1 of {parts} parts of the modules at a time)" if parts > 1 else ""


def facts_of(ledger: Ledger, all: Sequence[BudgetController]) -> dict[str, Any]:
    """The cost of recording, in all training threads together, and how often each kind is recorded: the largest
    stride of each."""
    first, *others = [governing.facts() for governing in all]
    elapsed_s, spent_s = ledger.elapsed_s or 1.0, ledger.spent_s
    unsure = [known for one in all if (known := one.governor.unsure_s) is not None]
    for other in others:
        for name in ("host_s", "gpu_s", "snapshots_s"):
            first[name] += other[name]
        if isinstance(first["stride"], dict) and isinstance(other["stride"], dict):
            first["stride"] = {kind: max(stride, other["stride"][kind]) for kind, stride in first["stride"].items()}
            first["parts"] = {**first["parts"], **other["parts"]}
    spent = {"steps": ledger.steps_s, "threads": ledger.threads_s, **ledger.spent_by}
    facts = {
        "seconds": round(spent_s, 4),
        "elapsed_s": round(elapsed_s, 4),
        "fraction": min(spent_s / elapsed_s, 1.0),
        "uncertainty": sum(unsure) / elapsed_s if unsure else None,
        "host_fraction": min(first.pop("host_s") / elapsed_s, 1.0),
        "gpu_fraction": min(first.pop("gpu_s") / elapsed_s, 1.0),
        "spent_s": {what: round(seconds, 4) for what, seconds in spent.items()},
        **first,
    }
    if unknown := next((governing.unknown for governing in all if governing.unknown), ""):
        facts |= {"seconds": None, "fraction": None, "uncertainty": None, "unknown": unknown}
    return facts


def _often(stride: float) -> str:
    return "every step" if stride < 1.05 else f"every {_number(stride)} steps"


def _number(stride: float) -> str:
    return f"{stride:.0f}" if stride >= 100 else f"{stride:.3g}"
