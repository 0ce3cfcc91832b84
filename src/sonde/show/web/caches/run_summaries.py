"""Summaries of runs for the list: loss curve, health, findings, overhead. Computed on a thread."""

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
from sonde.schema.words import recording_took
from sonde.show.analyses.convergence import convergence
from sonde.show.coverage import overhead_share
from sonde.show.diagnosis import stored_diagnosis
from sonde.show.summary import SeriesSummary, loss_series
from sonde.show.web.caches.background import BackgroundTasks
from sonde.show.web.caches.diagnoses import finding_key, judge
from sonde.show.web.finding_states import FindingStates
from sonde.show.web.runs import Entry, Head
from sonde.show.web.wire import number

POINTS: Final = 30
MAX_ROWS_TO_JUDGE: Final = 300_000
"""Maximum number of sketches of a run that is diagnosed for the list if it has no stored findings."""
LIVE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Kept:
    version: object
    brief: dict[str, Any]
    time: float


class Briefs:
    """Summaries by run. `of` returns at once with what is known and schedules the rest."""

    def __init__(self, states: FindingStates, on_ready: Callable[[str, dict[str, Any]], None] | None = None) -> None:
        self._states, self.on_ready = states, on_ready
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self.tasks = BackgroundTasks("sonde-briefs", self._work)

    def of(self, entry: Entry, head: Head) -> dict[str, Any] | None:
        """The summary, possibly slightly out of date; None while it is being computed."""
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
        """Counts of findings, without those that were acknowledged or muted."""
        assert head.manifest is not None
        if brief["findings"] is None:
            return brief
        counts = dict(brief["findings"])
        for one in self._states.of(entry.home, head.manifest.id).values():
            severity = one.get("severity")
            if severity in counts:
                counts[severity] = max(0, counts[severity] - 1)
        return {**brief, "findings": counts}


def _try_brief(entry: Entry) -> dict[str, Any] | None:
    try:
        # Not lent from the entry: readers of hundreds of unopened runs would stay in memory.
        return make_brief(entry, Run(entry.path))
    except (SondeError, OSError):  # broken: the list shows the reason
        return None


def make_brief(entry: Entry, run: Run) -> dict[str, Any]:
    is_readable = run.catalog.error is None
    counts, score = stored_diagnosis(run)
    if counts is None and run.catalog.is_complete and run.num_rows <= MAX_ROWS_TO_JUDGE:
        judged = judge(entry, run)
        if not judged.is_blind:
            counts = count_severities(f.severity for f in judged.findings if finding_key(f) not in judged.muted)
        score = judged.health.last
    loss = loss_series(run) if is_readable else None
    return {
        "last_step": run.last_step,
        "loss": _curve(loss),
        "convergence": _convergence(loss),
        "health": None if score is None or not np.isfinite(score) else round(float(score), 1),
        "findings": None if counts is None else {**count_severities(()), **counts},
        "overhead": overhead_share(run.manifest.facts.get("overhead")),
        "recording": recording_took(run.manifest.facts.get("overhead")),
    }


def _convergence(loss: SeriesSummary | None) -> dict[str, str] | None:
    """The verdict of `sonde report` on the loss."""
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
