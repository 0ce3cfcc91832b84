"""A run in a few numbers: scalars, largest gradients, durations. Shared by all views; draws nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.run import Run
from sonde.schema.losses import shown_scalars, training_loss
from sonde.schema.names import is_setting
from sonde.schema.window import Column
from sonde.schema.words import recording_took
from sonde.show.diagnosis import stored_diagnosis

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SeriesSummary:
    """A series with its first and last value, and its extremes over finite values."""

    name: str
    steps: Steps
    values: Floats

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def min(self) -> float:
        return self._extreme(np.min)

    @property
    def max(self) -> float:
        return self._extreme(np.max)

    @property
    def num_nonfinite(self) -> int:
        return int(np.count_nonzero(~np.isfinite(self.values)))

    def _extreme(self, function: Any) -> float:
        finite = self.values[np.isfinite(self.values)]
        return float(function(finite)) if len(finite) else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The series as `--json` prints it."""
        return {
            "name": self.name,
            "count": len(self.values),
            "first_step": int(self.steps[0]),
            "last_step": int(self.steps[-1]),
            "first": self.first,
            "last": self.last,
            "min": self.min,
            "max": self.max,
            "nonfinite": self.num_nonfinite,
        }


def scalar_series(run: Run, pattern: str = "*", steps: Any = None) -> list[SeriesSummary]:
    """The non-empty scalars that match a glob and that views list.

    Damaged data is left out and listed in `run.warnings`.
    """
    try:
        shown = set(shown_scalars(run.scalar_names))
        lines = run.scalar_lines(pattern, steps=steps)
        found = [SeriesSummary(name, *line) for name, line in lines.items() if name in shown]
        # A constant one is in `run.structure()`, and would push logged scalars out of sight.
        return [series for series in found if len(series.values) > 1 or not is_setting(series.name)]
    except CorruptError:
        return []


def loss_series(run: Run) -> SeriesSummary | None:
    """The training loss; None if there is none.

    Damaged data is left out and listed in `run.warnings`.
    """
    try:
        names = set(run.scalar_names)
        while (name := training_loss(names)) is not None:
            if found := run.scalar_lines(name, exact=True):
                return SeriesSummary(name, *found[name])
            names.remove(name)
    except CorruptError:
        pass
    return None


def largest_gradients(run: Run, *, at: int | None = None, num_sites: int = 10) -> list[SeriesSummary]:
    """Norms of the largest gradients at a step (default: the last recorded), each with its history up to that step.

    Damaged data is left out and listed in `run.warnings`.
    """
    try:
        return _largest_gradients(run, at, num_sites)
    except CorruptError:
        return []


def _largest_gradients(run: Run, at: int | None, num_sites: int) -> list[SeriesSummary]:
    last = run.last_step if at is None else at
    here = _norms_at(run, last, exactly=at is not None)
    top = [name for name, value in sorted(here.items(), key=lambda item: (-_order(item[1]), item[0]))[:num_sites]]
    if not top:
        return []
    found = run.lines([f"grad/{name}/norm" for name in top], steps=range(last + 1))
    # A glob may match more than the name it was made from: "a[0]" also matches "a0".
    return [SeriesSummary(name, *found[key]) for name in top if (key := f"grad/{name}/norm") in found]


def _order(value: float) -> float:
    """A sort key that puts non-finite norms first."""
    return value if math.isfinite(value) else math.inf


def _norms_at(run: Run, last: int, *, exactly: bool) -> dict[str, float]:
    """The norm of each gradient at its newest step up to `last`; searches further back until one is found."""
    if not run.sites("grad").num_rows:
        return {}
    reach = 1
    while True:
        first = max(last - reach + 1, 0)
        found = run.lines("grad/*/norm", steps=range(first, last + 1))
        if found or exactly or first == 0:
            return {name[len("grad/") : -len("/norm")]: float(values[-1]) for name, (_, values) in found.items()}
        reach *= 16


def steps_per_second(steps: Steps, times: Floats, num_stretches: int) -> Column:
    """Speed over roughly equal intervals, at the last step of each; intervals with a clock set back are dropped."""
    if len(steps) < 2:
        return steps[:0], times[:0]
    picked = np.unique(np.linspace(0, len(steps) - 1, min(num_stretches + 1, len(steps))).astype(np.intp))
    took, done = np.diff(times[picked]), np.diff(steps[picked])
    forward = took > 0
    return steps[picked][1:][forward], done[forward] / took[forward]


def duration_s(run: Run) -> float | None:
    """Seconds from the start to the end of the run, or to its last heartbeat."""
    manifest = run.manifest
    end = manifest.ended_time or manifest.heartbeat.time
    return max(end - manifest.created_time, 0.0) if end and manifest.created_time else None


def describe(run: Run) -> dict[str, Any]:
    """The facts that `list` shows about a run, ready for JSON."""
    loss = loss_series(run)
    findings, health = stored_diagnosis(run)
    return {
        "id": run.id,
        "project": run.project,
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "reason": run.reason,
        "created": run.created.isoformat(),
        "last_step": run.last_step,
        "duration_s": duration_s(run),
        "loss": None if loss is None else loss.to_dict(),
        "findings": findings,
        "health": health,
        "recording": recording_took(run.manifest.facts.get("overhead")),
        "tags": list(run.tags),
        "notes": run.notes,
        "warnings": run.warnings,
    }
