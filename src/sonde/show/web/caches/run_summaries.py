"""What the list shows of each run beyond run.json: loss curve, health, findings, overhead. Worked out on a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sonde.diagnose.finding import count_severities
from sonde.errors import SondeError
from sonde.run import Run
from sonde.schema.thinning import min_max
from sonde.schema.window import Window
from sonde.show.analyses.convergence import convergence
from sonde.show.coverage import overhead_share
from sonde.show.diagnosis import stored_diagnosis
from sonde.show.summary import SeriesSummary, loss_series
from sonde.show.web.caches.background import BackgroundTasks
from sonde.show.web.caches.diagnoses import judge
from sonde.show.web.finding_states import FindingStates
from sonde.show.web.runs import Entry, Head
from sonde.show.web.wire import number

POINTS: Final = 30
MAX_ROWS_TO_JUDGE: Final = 300_000
"""A run without a verdict of its own is judged for the list when it is this small."""
LIVE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Kept:
    version: object
    brief: dict[str, Any]
    time: float


class Briefs:
    """Briefs by run. `of` answers at once with what is known and sees to it that it becomes known."""

    def __init__(self, states: FindingStates, on_ready: Callable[[str, dict[str, Any]], None] | None = None) -> None:
        self._states, self.on_ready = states, on_ready
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self.tasks = BackgroundTasks("sonde-briefs", self._work)

    def of(self, entry: Entry, head: Head) -> dict[str, Any] | None:
        """The brief, possibly of a moment ago; None when it is still being worked out."""
        if head.manifest is None:
            return None
        version = head.status, head.step, head.manifest.heartbeat.time
        with self._lock:
            kept = self._kept.get(entry.id)
            is_fresh = kept is not None and (
                kept.version == version or (head.status == "running" and time.monotonic() - kept.time < LIVE_EVERY_S)
            )
        if not is_fresh:
            self.tasks.add(entry.id, (entry, head))
        return None if kept is None else self._with_states(entry, head, kept.brief)

    def _work(self, asked: tuple[Entry, Head]) -> None:
        entry, head = asked
        brief = _try_brief(entry)
        if brief is None or head.manifest is None:
            return
        version = head.status, head.step, head.manifest.heartbeat.time
        with self._lock:
            self._kept[entry.id] = _Kept(version, brief, time.monotonic())
        if self.on_ready is not None:
            self.on_ready(entry.id, self._with_states(entry, head, brief))

    def _with_states(self, entry: Entry, head: Head, brief: dict[str, Any]) -> dict[str, Any]:
        """Findings that somebody has dealt with do not count."""
        assert head.manifest is not None
        counts = dict(brief["findings"])
        for one in self._states.of(entry.home, head.manifest.id).values():
            severity = one.get("severity")
            if severity in counts:
                counts[severity] = max(0, counts[severity] - 1)
        return {**brief, "findings": counts}


def _try_brief(entry: Entry) -> dict[str, Any] | None:
    try:
        # Not lent from the entry: readers of hundreds of runs that nobody opened would be kept.
        return make_brief(entry, Run(entry.path))
    except (SondeError, OSError):  # broken: the list says why by itself
        return None


def make_brief(entry: Entry, run: Run) -> dict[str, Any]:
    is_readable = run.catalog.error is None
    counts, score = stored_diagnosis(run)
    if counts is None and is_readable and run.num_rows <= MAX_ROWS_TO_JUDGE:
        judged = judge(entry, run)
        counts = count_severities(finding.severity for finding in judged.findings)
        score = judged.health.last
    known = {**count_severities(()), **(counts or {})}
    loss = loss_series(run) if is_readable else None
    return {
        "last_step": run.last_step,
        "loss": _curve(loss),
        "convergence": _convergence(loss),
        "health": None if score is None or not np.isfinite(score) else round(float(score), 1),
        "findings": known,
        "overhead": overhead_share(run.manifest.facts.get("overhead")),
    }


def _convergence(loss: SeriesSummary | None) -> dict[str, str] | None:
    """What `sonde report` says of the loss."""
    if loss is None:
        return None
    found = convergence(Window(scalars={loss.name: (loss.steps, loss.values)}))
    return {"tone": found.tone, "verdict": found.verdict}


def _curve(loss: SeriesSummary | None) -> dict[str, Any] | None:
    if loss is None or not len(loss.steps):
        return None
    kept = min_max(loss.steps, loss.values, POINTS)
    return {
        "name": loss.name,
        "last": number(loss.last),
        "steps": loss.steps[kept].tolist(),
        "values": [number(float(f"{value:.5g}")) for value in loss.values[kept]],
    }
