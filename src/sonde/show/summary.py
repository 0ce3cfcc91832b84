"""A run in few numbers: its scalars, its largest gradients, its times. What every view shows first; draws nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.errors import CorruptError
from sonde.run import Run
from sonde.schema.losses import shown_scalars, training_loss
from sonde.schema.names import is_setting
from sonde.show.diagnosis import stored_diagnosis

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SeriesSummary:
    """One series: its ends, its extremes over finite values, and the series itself for a picture."""

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
        """What `--json` says of it."""
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
    """The scalars that views list and a glob names, none of them empty.

    What is damaged is left out, and in `run.warnings`.
    """
    try:
        shown = set(shown_scalars(run.scalar_names))
        found = [series for series in _split(run.scalars(pattern, steps=steps), "name") if series.name in shown]
        # One that never changed is in `run.structure()`, and would push what was logged out of sight.
        return [series for series in found if len(series.values) > 1 or not is_setting(series.name)]
    except CorruptError:
        return []


def _split(table: Any, column: str) -> Iterator[SeriesSummary]:
    """A table in order of (column, step), cut into its series. Of values at the same step the last counts."""
    names = table[column].combine_chunks().dictionary_decode().to_pylist() if table.num_rows else []
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    start = 0
    for end in range(1, len(names) + 1):
        if end == len(names) or names[end] != names[start]:
            own = steps[start:end]
            is_last = np.append(own[1:] != own[:-1], True)
            yield SeriesSummary(names[start], own[is_last], values[start:end][is_last])
            start = end


def loss_series(run: Run) -> SeriesSummary | None:
    """The training loss; None where there is none.

    What is damaged is left out, and in `run.warnings`.
    """
    try:
        names = set(run.scalar_names)
        while (name := training_loss(names)) is not None:
            # A glob may name more than it was made from: "a[0]" also matches "a0".
            for series in _split(run.scalars(name), "name"):
                if series.name == name:
                    return series
            names.remove(name)
    except CorruptError:
        pass
    return None


def largest_gradients(run: Run, *, at: int | None = None, num_sites: int = 10) -> list[SeriesSummary]:
    """Norms of the gradients that are largest at a step (the last one recorded), each with its history up to there.

    What is damaged is left out, and in `run.warnings`.
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
    table = run.stats([f"grad/{name}/norm" for name in top], steps=range(last + 1))
    # A glob may name more than it was made from: "a[0]" also matches "a0".
    series = {one.name: one for one in _split(table, "site")}
    return [series[name] for name in top if name in series]


def _order(value: float) -> float:
    """A norm that is not a number is worse than any that is."""
    return value if math.isfinite(value) else math.inf


def _norms_at(run: Run, last: int, *, exactly: bool) -> dict[str, float]:
    """The norm of each gradient at its newest step up to `last`; looks back further and further until one is found."""
    if not run.sites("grad").num_rows:
        return {}
    reach = 1
    while True:
        first = max(last - reach + 1, 0)
        table = run.stats("grad/*/norm", steps=range(first, last + 1))
        if table.num_rows or exactly or first == 0:
            return {series.name: series.last for series in _split(table, "site")}
        reach *= 16


def duration_s(run: Run) -> float | None:
    """From the beginning to the end, or to the last sign of life."""
    manifest = run.manifest
    end = manifest.ended_time or manifest.heartbeat.time
    return max(end - manifest.created_time, 0.0) if end and manifest.created_time else None


def describe(run: Run) -> dict[str, Any]:
    """What `list` says of a run, ready for JSON."""
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
        "tags": list(run.tags),
        "notes": run.notes,
        "warnings": run.warnings,
    }
