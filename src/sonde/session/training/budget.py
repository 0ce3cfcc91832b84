"""Keeping to the budget: what the meter has measured goes to the governor, and what it changes becomes an event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from sonde.budget.governor import KINDS, Change, Governor
from sonde.budget.memory import memory_shares
from sonde.budget.meter import Meter, StepTimes
from sonde.session.recording import Recording

_LOOK_EVERY: Final = 50
"""Every how many steps memory is looked at."""
_EASE: Final = 0.05
"""Memory must be freer than the threshold by this much before recording goes back to what it was."""
_STARTS: Final = 2
"""How many times something must have been recorded before its cost is believed."""
OF_KIND: Final = {
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
    """One for each thread that trains: its clocks and its cadence."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.meter = recording, Meter()
        self.governor = Governor(recording.settings.budget, recording.settings.free_steps)
        self.snapshots_s = 0.0
        """What snapshots took on the training thread; no part of the budget."""
        self._gpu_s: dict[str, float] = {}
        """What each kind took when it was last measured."""
        self._num_seen: dict[str, int] = {}
        self._from_step = 0
        """Steps before it say nothing any more, though a device may finish them later."""
        self.is_together = False
        """Whether all kinds are recorded together or not at all: a compiler knows only the two."""
        self.unknown = ""
        """Why the cost is not known, where it is not."""

    def allows(self, step: int, kind: str, *, scheduled: bool = True) -> bool:
        return self.governor.allows(step, OF_KIND[kind], scheduled=scheduled)

    def end_step(self, step: int, wall_s: float) -> None:
        """Close the step, and take in those that the device has finished since."""
        self.meter.end_step(step, wall_s)
        for times in self.meter.done():
            self._take(times)
        if step == self.governor.free_steps - 1 and self.governor.budget is not None:
            self._begin()
        if step % _LOOK_EVERY == _LOOK_EVERY - 1:
            self._look_at_memory()

    def facts(self) -> dict[str, Any]:
        facts = {**self.governor.facts(), "snapshots_s": round(self.snapshots_s, 4)}
        if self.is_together:
            facts |= {"stride": round(self.governor.stride("optimizer")), "is_together": True}
        if self.unknown:
            facts |= {"fraction": None, "uncertainty": None, "unknown": self.unknown}
        return facts

    def _begin(self) -> None:
        """The free steps are over. What things cost where all is recorded at once is not what they cost from now on."""
        self._from_step = self.governor.free_steps
        self.governor.begin(self._from_step)
        self.meter.measure_anew()
        self._gpu_s.clear()

    def _take(self, times: StepTimes) -> None:
        self.snapshots_s += times.host_s.get("snapshots", 0.0)
        if times.step < self._from_step or self._is_first(times):
            return
        if times.host_s:
            self.unknown = ""
        self._gpu_s |= times.gpu_s or {}
        costs = {kind: self._cost(kind, times) for kind in times.host_s if kind != "snapshots"}
        change = self.governor.observe(
            times.step,
            costs,
            # A snapshot is asked for, and not thinned: a step is not dearer to watch because one was taken in it.
            step_s=max(times.step_s - times.host_s.get("snapshots", 0.0), 0.0),
            host_s=sum(seconds for kind, seconds in times.host_s.items() if kind != "snapshots"),
            gpu_s=sum(self._gpu_s.get(kind, 0.0) for kind in costs if kind in times.launched),
        )
        if change is not None:
            self._tell(change)

    def _is_first(self, times: StepTimes) -> bool:
        """Whether something in this step was new: then kernels were compiled and memory was made, once and for all."""
        new = [kind for kind in times.host_s if self._num_seen.get(kind, 0) < _STARTS]
        for kind in new:
            self._num_seen[kind] = self._num_seen.get(kind, 0) + 1
        return bool(new)

    def _cost(self, kind: str, times: StepTimes) -> float:
        """Host time hides behind the GPU's work as long as the GPU has some."""
        host_s = times.host_s[kind]
        if self.meter.device is None:
            return host_s
        gpu_s = self._gpu_s.get(kind, 0.0) if kind in times.launched else 0.0
        return max(gpu_s, host_s) if times.is_host_bound else gpu_s

    def _look_at_memory(self) -> None:
        settings = self.recording.settings
        try:
            share = max(memory_shares(self.meter.device), default=0.0)
        except OSError as error:  # no file can be opened
            why = f"how full the memory is cannot be read ({error}): recording is not thinned where it is short."
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
        often = ", ".join(f"{kind} {_often(change.strides[kind])}" for kind in KINDS)
        if self.is_together:
            often = f"one in {_number(change.strides['optimizer'])} of the steps that `when` names"
        if math.isinf(self.governor.pressure):
            often = "nothing" if self.is_together else "gradients only"
        message = f"recording changes, {change.reason}: {often}"
        self.recording.event("cadence", message, details={**self.facts(), **details})


def joined_facts(all: Sequence[BudgetController]) -> dict[str, Any]:
    """Of all threads that train: shares of their time together, and how often the rarest of each kind is recorded."""
    first, *others = [governing.facts() for governing in all]
    if not others:
        return first
    facts, weights = [first, *others], [governing.governor.total_s for governing in all]
    total_s = sum(weights) or 1.0
    for name in ("fraction", "uncertainty", "host_fraction", "gpu_fraction"):
        known = [one[name] for one in facts]
        is_known = None not in known
        first[name] = sum(w * v for w, v in zip(weights, known, strict=True)) / total_s if is_known else None
    if all_are_dicts := [one["stride"] for one in facts if isinstance(one["stride"], dict)]:
        first["stride"] = {kind: max(one[kind] for one in all_are_dicts) for kind in all_are_dicts[0]}
    first["snapshots_s"] = sum(one["snapshots_s"] for one in facts)
    return first


def _often(stride: float) -> str:
    return "at every step" if stride < 1.05 else f"at one in {_number(stride)}"


def _number(stride: float) -> str:
    return f"{stride:.0f}" if stride >= 100 else f"{stride:.3g}"
