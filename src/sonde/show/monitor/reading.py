"""Incremental reading of a run that is being written: each call reads only new data. Independent of the terminal."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import pyarrow as pa

from sonde.errors import SondeError
from sonde.run import Run, by_series
from sonde.schema.losses import is_loss, shown_scalars, training_loss, validation_loss
from sonde.schema.names import matches_any
from sonde.schema.thinning import min_max
from sonde.show.diagnosis import health_of, stored_diagnosis
from sonde.show.monitor.frame import Curve, Frame, RunLine, worst_layers
from sonde.show.pooled import COLUMNS, LivePool
from sonde.show.summary import steps_per_second
from sonde.show.web.caches.diagnoses import recorded_findings

OTHER_SCALARS: Final = ("*lr*", "*learning_rate*", "*acc*")
"""Scalars that are drawn in addition to the losses."""
LATE_STEPS: Final = 16
"""Number of newest steps that are read again: rows of a step may reach the disk after those of the next."""
MAX_POINTS: Final = 4000
RATE_POINTS: Final = 120
FULL_DIAGNOSIS_ROWS: Final = 5_000_000
"""Run all rules on a finished run unless it has more values than this."""


class Reading:
    """The data read from one run so far."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pattern = ("grad", "rms")
        self.pool = LivePool("rms")
        self.scalars: dict[str, dict[int, tuple[float, float]]] = {}
        self._thin: dict[str, Curve] = {}
        self._names: tuple[str, ...] = ()
        self._seen_stats = self._seen_scalars = -1
        self._num_attempts = 1
        self._judged: dict[str, Any] | None = None
        self.problem = ""

    # ------------------------------------------------------------------------------------------------------- reading

    def look(self) -> None:
        """Read what was written since the last call. A failure is shown and tried again."""
        try:
            self._forget_abandoned()
            last = self.run.last_step
            self._look_at_scalars(last)
            self._look_at_stats(last)
            self.problem = ""
        except SondeError as error:
            self.problem = str(error)
        except OSError as error:  # the folder was moved or deleted meanwhile
            self.problem = f"Cannot read {self.run.path} any more: {error.strerror}."

    def _forget_abandoned(self) -> None:
        """Discard the data of later steps after training returned to an earlier one."""
        num_attempts = self.run.num_attempts
        if num_attempts != self._num_attempts:
            self._num_attempts, self.pool, self.scalars, self._thin = num_attempts, LivePool(self.pattern[1]), {}, {}
            self._seen_stats = self._seen_scalars = -1
            self._judged = None

    def show(self, kind: str, stat: str) -> None:
        """Switch to another stat."""
        if (kind, stat) != self.pattern:
            self.pattern, self.pool, self._seen_stats = (kind, stat), LivePool(stat), -1

    def kinds(self) -> list[str]:
        """The recorded kinds, in the order of their first site."""
        return list(dict.fromkeys(self.run.sites()["kind"].to_pylist()))

    def _look_at_stats(self, last: int) -> None:
        if last <= self._seen_stats or not self.run.sites(self.pattern[0]).num_rows:
            return
        kind, stat = self.pattern
        patterns = list(dict.fromkeys([f"{kind}/*/{stat}", f"{kind}/*/nonfinite_fraction"]))
        if self._seen_stats < 0:
            table = self.run.overview(patterns, points=COLUMNS)
            order = [f"{kind}/{name}" for name in self.run.sites(kind)["site"].to_pylist()]
        else:
            table = self.run.stats(patterns, steps=range(max(self._seen_stats - LATE_STEPS, 0), last + 1))
            order = list(self.pool.row_of)
        self.pool.add(table, order)
        self._seen_stats = last

    def _look_at_scalars(self, last: int) -> None:
        first = max(self._seen_scalars - LATE_STEPS, 0) if self._seen_scalars >= 0 else None
        steps = None if first is None else slice(first, None)
        self._names = self.run.scalar_names
        table: pa.Table = self.run.scalars(
            [name for name in self._names if is_loss(name) or matches_any(OTHER_SCALARS, name.lower())], steps=steps
        )
        if first is None and not table.num_rows:
            table = self.run.scalars("*", steps=steps)
        for name, (own, values), times in _with_times(table):
            column = self.scalars.setdefault(name, {})
            column.update(zip(own.tolist(), zip(values.tolist(), times.tolist(), strict=True), strict=True))
            self._keep_few(name, column)
        self._seen_scalars = max(self._seen_scalars, last)

    def _keep_few(self, name: str, column: dict[int, tuple[float, float]]) -> None:
        """Downsample a curve: keep the minimum, the maximum and the first non-finite value of each interval."""
        steps = np.array(sorted(column), np.int64)
        values = np.array([column[step][0] for step in steps.tolist()])
        if len(steps) > 2 * MAX_POINTS:
            kept = min_max(steps, values, MAX_POINTS // 2)
            self.scalars[name] = {int(step): column[int(step)] for step in steps[kept]}
            steps, values = steps[kept], values[kept]
        self._thin[name] = Curve(name, steps, values)

    # --------------------------------------------------------------------------------------------------------- frames

    def frame(self, runs: tuple[RunLine, ...] = ()) -> Frame:
        try:
            return self._frame(runs)
        except (SondeError, OSError) as error:
            return Frame(run=None, runs=runs, problem=self.problem or str(error))

    def _frame(self, runs: tuple[RunLine, ...]) -> Frame:
        heat = self.pool.pooled()
        _, health = stored_diagnosis(self.run)
        judged = self._judged
        findings = _live_findings(self.run) if judged is None else judged["findings"]
        manifest = self.run.manifest
        sign = max(manifest.heartbeat.time, manifest.created_time)
        return Frame(
            run=run_line(self.run),
            reason=self.run.reason,
            losses=tuple(self._curves()),
            loss=training_loss(self._names),
            rate=self._rate(),
            stat=f"{self.pattern[0]}/*/{self.pattern[1]}",
            heat=heat if heat.values.size else None,
            worst=worst_layers(heat),
            findings=tuple(findings),
            health=health if judged is None else judged["health"],
            is_judged=judged is not None,
            is_blind=self._is_lost() if judged is None else judged["is_blind"],
            warnings=(*self.run.warnings, *([self.problem] if self.problem else [])),
            runs=runs,
            age_s=max(time.time() - sign, 0.0) if sign else None,
        )

    def _is_lost(self) -> bool:
        """Whether the run has ended without data, or its data no longer exists."""
        return self.run.status != "running" and (self.run.last_step < 0 or not self.run.catalog.is_complete)

    def _curves(self) -> list[Curve]:
        """The training loss, the validation loss, other losses, then the rest."""
        losses = [training_loss(self._names), validation_loss(self._names)]

        def place(name: str) -> tuple[int, bool, int, str]:
            return losses.index(name) if name in losses else len(losses), not is_loss(name), len(name), name

        shown = [name for name in shown_scalars(self._names) if name in self._thin] or list(self._thin)
        return [self._thin[name] for name in sorted(shown, key=place)]

    def _rate(self) -> Curve | None:
        """Steps per second, from the times at which the densest scalar was logged."""
        if not self.scalars:
            return None
        column = max(self.scalars.values(), key=len)
        steps = np.array(sorted(column), np.int64)
        times = np.array([column[step][1] for step in steps.tolist()])
        return throughput(steps, times)

    def judge(self) -> None:
        """Run all rules; takes a second or more."""
        try:
            found = self.run.diagnosis()
        except (SondeError, OSError) as error:
            self.problem = str(error)
            return
        rows = []
        for finding in (*found.roots, *found.remarks):
            rows.append(finding.as_dict())
            rows += [{**symptom.as_dict(), "caused_by": finding.rule} for symptom in finding.cause_of]
        self._judged = {"findings": rows, "health": health_of(found), "is_blind": found.is_blind}

    def is_worth_judging(self) -> bool:
        """Whether the run has ended, has not been judged yet, and is small enough to judge quickly."""
        if self._judged is not None or self.run.status == "running":
            return False
        return bool(self.run.sites().num_rows * max(self.run.last_step, 0) <= FULL_DIAGNOSIS_ROWS)


def throughput(steps: Any, times: Any) -> Curve | None:
    """Steps per second over intervals; None if fewer than two times are known."""
    found = steps_per_second(steps, times, RATE_POINTS)
    return Curve("steps/s", *found) if len(found[0]) else None


def run_line(run: Run) -> RunLine:
    return RunLine(run.id, str(run.path), run.project, run.name, run.status, run.last_step, run.created.timestamp())


def _with_times(table: pa.Table) -> list[tuple[str, Any, Any]]:
    times = table.set_column(table.column_names.index("value"), "value", table["time"])
    moments = by_series(times, ("name",))
    return [(name, column, moments[name][1]) for name, column in by_series(table, ("name",)).items()]


def _live_findings(run: Run) -> list[dict[str, Any]]:
    """Live findings, most severe and newest first."""
    found = sorted(recorded_findings(run), key=lambda finding: (-finding.severity.rank, -finding.step))
    return [finding.as_dict() for finding in found]
