"""The contents of the monitor at one moment, as plain data for the screen, `--once` and `--json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.show.pooled import Pooled

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
NUM_WORST: Final = 50


@dataclass(frozen=True, slots=True)
class Curve:
    """A series by step."""

    name: str
    steps: Steps
    values: Floats

    @property
    def last(self) -> float:
        return float(self.values[-1]) if len(self.values) else np.nan


@dataclass(frozen=True, slots=True)
class Worst:
    """A layer that stands out: non-finite, or far from the others."""

    site: str
    value: float
    """The newest value of the stat."""
    times_median: float
    """That value divided by the median of all sites."""
    odd_step: int | None
    """The step of its first non-finite value, with the precision of a column."""
    history: Floats

    def as_dict(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "value": self.value,
            "times_median": self.times_median,
            "nonfinite_since": self.odd_step,
        }


@dataclass(frozen=True, slots=True)
class RunLine:
    id: str
    path: str
    project: str
    name: str
    status: str
    last_step: int
    created: float

    @property
    def label(self) -> str:
        return f"{self.project}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One run at one moment, and the list of the other runs."""

    run: RunLine | None
    reason: str = ""
    losses: tuple[Curve, ...] = ()
    """The training loss first, then other logged losses."""
    loss: str | None = None
    """Name of the training loss."""
    rate: Curve | None = None
    """Steps per second."""
    stat: str = "grad/*/rms"
    heat: Pooled | None = None
    worst: tuple[Worst, ...] = ()
    findings: tuple[dict[str, Any], ...] = ()
    """Findings as dictionaries: rule, severity, step, last_step, message, remedy, sites."""
    health: float | None = None
    is_judged: bool = False
    """Whether all rules have checked the whole run; otherwise these are the live findings."""
    is_blind: bool = False
    """Whether the run has ended and nothing can be read that rules check."""
    warnings: tuple[str, ...] = ()
    runs: tuple[RunLine, ...] = ()
    problem: str = ""
    """Why there is nothing to show, and what to do."""
    age_s: float | None = field(default=None)
    """Seconds since the last heartbeat."""

    def as_dict(self) -> dict[str, Any]:
        """The output of `--once --json`."""
        run = self.run
        return {
            "run": None if run is None else _line(run),
            "reason": self.reason,
            "loss": self.loss,
            "scalars": {curve.name: curve.last for curve in self.losses},
            "steps_per_s": None if self.rate is None else self.rate.last,
            "health": self.health,
            "findings": list(self.findings),
            "worst_layers": {"stat": self.stat, "layers": [one.as_dict() for one in self.worst]},
            "warnings": list(self.warnings),
            "runs": [_line(one) for one in self.runs],
            "problem": self.problem,
        }


def _line(run: RunLine) -> dict[str, Any]:
    return {key: getattr(run, key) for key in ("id", "project", "name", "path", "status", "last_step")}


def worst_layers(heat: Pooled, num: int = NUM_WORST) -> tuple[Worst, ...]:
    """Sites with non-finite values, earliest first; then those furthest from the median of all sites."""
    if not heat.values.size:
        return ()
    last = np.array([row[np.isfinite(row)][-1] if np.isfinite(row).any() else np.nan for row in heat.values])
    positive = last[np.isfinite(last) & (last > 0)]
    middle = float(np.median(positive)) if len(positive) else np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        times = last / middle
        decades = np.where(last > 0, np.abs(np.log10(times)), np.where(last == 0, np.inf, -1.0))
    odd = [_first(row) for row in heat.is_odd]
    order = sorted(range(len(last)), key=lambda row: (odd[row], -_order(float(decades[row])), row))[:num]
    never = heat.is_odd.shape[1]
    return tuple(
        Worst(
            heat.sites[row],
            float(last[row]),
            float(times[row]),
            heat.column_step(odd[row]) if odd[row] < never else None,
            heat.values[row],
        )
        for row in order
    )


def _first(is_odd: NDArray[np.bool_]) -> int:
    """The first column that is set, or the number of columns if none is."""
    return int(np.argmax(is_odd)) if is_odd.any() else len(is_odd)


def _order(value: float) -> float:
    return float(value) if value == value else -1.0
