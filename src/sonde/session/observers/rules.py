"""Runs the rules during training: on the writer thread, in bounded memory, for a bounded fraction of the time.

Records are kept until the next check. A check turns them into columns, runs the rules, and reports new findings. The
next one comes when the process has worked long enough to afford it: all checks so far, and one more like the last, take
at most SHARE of the process's own time. However slow the rules are, they cost no more than that fraction of training;
only a value that becomes non-finite is checked without delay, a few times per run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sonde.schema.layout import MODEL_FILE, RunStatus
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord, SystemSample
from sonde.write.items import Document, Facts, FindingRow, NewAttempt, NewScalar, NewSite
from sonde.write.observer import Item, Output

if TYPE_CHECKING:
    from sonde.diagnose.diagnosis import Diagnosis
    from sonde.diagnose.finding import Finding, Severity
    from sonde.diagnose.rolling import Rolling
    from sonde.diagnose.tracker import Changes, Tracked

SHARE: Final = 0.003
FIRST_LOOK_S: Final = 2.0
SHORTEST_PAUSE_S: Final = 2.0
IDLE_FACTOR: Final = 10
"""A process that mostly waits does little work; there the next check comes after this factor times t / SHARE seconds
of real time."""
MAX_WAITING_BYTES: Final = 16 << 20
"""Records that may wait for the next check; above this they are turned into columns at once."""
_RECORD_BYTES: Final = 640
"""Memory of a record in addition to its numbers: for a single logged number that is nearly all."""
MAX_EVENTS: Final = 1000
MAX_CORRECTIONS: Final = 20
"""Corrections printed during a run. Findings that come and go would fill the terminal; all of them are events."""
MAX_URGENT: Final = 3
"""Checks without delay, because a value became non-finite: someone who pays for a GPU wants to know now."""
_EARLY_RECORDS: Final = 512


class Change(StrEnum):
    """The reason for printing a finding that was printed before."""

    NEW = ""
    CORRECTED = "corrected"
    OVER = "no longer so"
    EXPLAINED = "consequence"


class Announcement(NamedTuple):
    """A finding to print, and why."""

    finding: Finding
    change: Change = Change.NEW


@dataclass(frozen=True, slots=True)
class Said:
    """A printed finding: the finding it follows, its severity at that time, and why it was printed."""

    tracked: Tracked
    severity: Severity
    change: Change


class LiveRules:
    """An `Observer` that sees every record and runs the rules from time to time.

    `work_clock` is the CPU time of the process that trains.
    """

    def __init__(
        self,
        say: Callable[[Announcement], None],
        *,
        work_clock: Callable[[], float] | None = None,
        first_look_s: float | None = None,
    ) -> None:
        self._say = say
        self._work_clock = work_clock or time.process_time
        self._rolling: Rolling | None = None
        self._sites: dict[int, Site] = {}
        self._scalar_names: dict[int, str] = {}
        self._content: Mapping[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._structure: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []
        self._waiting: list[StatsRecord | ScalarsRecord | SystemSample] = []
        self._waiting_bytes = self._num_records = 0
        self._stride = 1
        self._is_urgent = False
        self._num_urgent = 0
        self._said: dict[str, Said] = {}
        """By rule: what was printed last."""
        self._num_corrections = 0
        self._failed: dict[str, str] = {}
        self._began_work_s = self._work_clock()
        self._next_look = self._latest_look = time.monotonic() + (
            FIRST_LOOK_S if first_look_s is None else first_look_s
        )
        self._next_work_s = 0.0
        self.spent_s = 0.0
        """Time of this thread spent on columns and rules, without `import_s`, the time to import them."""
        self.import_s = 0.0
        self.num_looks = 0

    # ---------------------------------------------------------------------------------------------------------- records

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        self._sites.update(sites)
        self._scalar_names.update(scalars)
        self._content = content  # the writer's own mapping; later additions appear here
        self._facts.update(content.get("facts") or {})

    def on_item(self, item: Item) -> None:
        if isinstance(item, StatsRecord | ScalarsRecord | SystemSample):
            self._keep(item)
        elif isinstance(item, NewSite):
            self._sites[item.id] = item.site
        elif isinstance(item, NewScalar):
            self._scalar_names[item.id] = item.name
        elif isinstance(item, Document):
            if item.name == MODEL_FILE:
                self._structure = item.content
        elif isinstance(item, Facts):
            self._facts.update({} if item.is_top else item.facts)
        elif isinstance(item, NewAttempt):
            self._forget(item.step)
        elif len(self._events) < MAX_EVENTS:
            self._is_urgent |= item.type == "nonfinite" and self._num_urgent < MAX_URGENT
            self._events.append({name: getattr(item, name) for name in Event.__dataclass_fields__})

    def _forget(self, step: int) -> None:
        """Training returned to this step: records after it no longer count for findings."""
        if self._waiting:
            self._measured(self._take_in)
        if self._rolling is not None:
            self._rolling.forget(step)
            for rule in self._tracker.forget(step):
                self._said.pop(rule, None)
        self._events = [event for event in self._events if event["step"] < step]

    def _keep(self, record: StatsRecord | ScalarsRecord | SystemSample) -> None:
        if isinstance(record, StatsRecord):
            self._num_records += 1
            if self._num_records > _EARLY_RECORDS and self._num_records % self._stride:
                return
            self._waiting_bytes += record.rows.nbytes + record.hist.nbytes
        elif isinstance(record, ScalarsRecord):
            self._waiting_bytes += 4 * record.values.nbytes
        self._waiting_bytes += _RECORD_BYTES
        self._waiting.append(record)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            self._measured(self._take_in)

    # ----------------------------------------------------------------------------------------------------------- checks

    def poll(self, now: float) -> Iterator[Output]:
        is_earned = now >= self._next_look and (self._work_clock() >= self._next_work_s or now >= self._latest_look)
        if not is_earned and not self._is_urgent:
            return
        self._num_urgent += self._is_urgent
        self._is_urgent = False
        took_s = -self.spent_s
        yield from self._look("running")
        took_s += self.spent_s
        self._next_look = now + SHORTEST_PAUSE_S
        self._next_work_s = self._began_work_s + (self.spent_s + took_s) / SHARE
        self._latest_look = now + IDLE_FACTOR * took_s / SHARE

    def finish(self, status: RunStatus) -> Iterator[Output]:
        yield from self._look(status, is_last=True)

    def _look(self, status: RunStatus, *, is_last: bool = False) -> Iterator[Output]:
        if self._rolling is None and not self._waiting:
            return
        self._import()
        outputs = self._measured(lambda: list(self._diagnosed(status, is_last=is_last)))
        self.num_looks += 1
        yield from outputs

    def _diagnosed(self, status: RunStatus, *, is_last: bool) -> Iterator[Output]:
        from sonde.diagnose.check import all_rules
        from sonde.diagnose.diagnosis import diagnose

        rolling = self._take_in()
        rules = [rule for name, rule in all_rules().items() if name not in self._failed]
        failed: list[tuple[str, Exception]] = []
        found = diagnose(
            rolling.window(self._known(status)), rules, on_error=lambda name, error: failed.append((name, error))
        )
        for name, error in failed:
            self._failed[name] = repr(error)
            yield self._event(found, "rule_failed", f"the rule {name} failed and is skipped: {error!r}", "warning")
        yield from self._changes(found, is_last=is_last)
        if not found.is_blind:
            yield Facts({"diagnosis": self._summary(found)})

    def _changes(self, found: Diagnosis, *, is_last: bool) -> Iterator[Output]:
        changes = self._tracker.look(found.findings, is_last=is_last)
        for tracked in changes.begun:
            finding = tracked.finding
            details = {"rule": finding.rule, "sites": list(finding.sites), "confidence": finding.confidence}
            yield self._event(found, "finding", finding.message, str(finding.severity), **details)
        for tracked in (*changes.begun, *changes.updated):
            yield _row(tracked.number, tracked.finding)
        for tracked in changes.ended:
            finding = tracked.finding
            message = f"{finding.rule} was last seen at step {finding.last_step}"
            yield self._event(found, "finding_ended", message, "info", rule=finding.rule, sites=list(finding.sites))
        self._print(found, changes)

    def _print(self, found: Diagnosis, changes: Changes) -> None:
        """Print new root findings, one per rule, and correct what was printed and is no longer so."""
        current = {id(tracked) for tracked in (*changes.begun, *changes.updated)}
        for tracked in changes.begun:
            finding, said = tracked.finding, self._said.get(tracked.finding.rule)
            if not finding.severity > "info" or found.is_explained(finding):
                continue
            if said is None:
                self._put(tracked, Change.NEW)
            elif id(said.tracked) not in current:  # the same fault, with another origin
                self._put(tracked, Change.CORRECTED)
        for said in list(self._said.values()):
            now = said.tracked.finding
            if said.change not in (Change.NEW, Change.CORRECTED):
                continue
            if said.tracked in changes.ended:
                self._put(said.tracked, Change.OVER)
            elif id(said.tracked) in current and found.is_explained(now):
                self._put(said.tracked, Change.EXPLAINED)
            elif id(said.tracked) in current and now.severity > said.severity:
                self._put(said.tracked, Change.CORRECTED)

    def _put(self, tracked: Tracked, change: Change) -> None:
        self._said[tracked.finding.rule] = Said(tracked, tracked.finding.severity, change)
        self._num_corrections += change != Change.NEW
        if self._num_corrections <= MAX_CORRECTIONS:
            self._say(Announcement(tracked.finding, change))

    def _summary(self, found: Diagnosis) -> dict[str, Any]:
        from sonde.diagnose.finding import count_severities
        from sonde.diagnose.health import health_by

        open_findings = self._tracker.open
        health = health_by(open_findings, found.window, found.health, found.findings).last
        return {
            **count_severities(finding.severity for finding in open_findings),
            "health": None if health != health else round(health, 1),
            "step": found.window.last_step,
            "num_rules": found.num_rules,
            "muted": len(found.muted),
            "spent_s": round(self.spent_s, 4),
        }

    @property
    def num_bytes(self) -> int:
        """The memory of the columns."""
        return 0 if self._rolling is None else self._rolling.num_bytes

    # -------------------------------------------------------------------------------------------------------- internals

    def _import(self) -> None:
        """Import the rules at the first check, not when training starts."""
        if self._rolling is None:
            before = time.thread_time()
            from sonde.diagnose.diagnosis import all_required_series
            from sonde.diagnose.rolling import Rolling
            from sonde.diagnose.tracker import Tracker

            self._rolling, self._tracker = Rolling(all_required_series()), Tracker()
            self._rolling.sites, self._rolling.scalar_names = self._sites, self._scalar_names
            self.import_s = time.thread_time() - before

    def _take_in(self) -> Rolling:
        self._import()
        assert self._rolling is not None
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        before = time.thread_time()
        self._rolling.add(waiting)
        self._thin(time.thread_time() - before, len(waiting))
        return self._rolling

    def _thin(self, took_s: float, num_records: int) -> None:
        """Take every second, fourth, … record if that alone would use half of the time allowed."""
        rate = self._num_records / max(self._work_clock() - self._began_work_s, 1.0) / self._stride
        cost = rate * took_s / max(num_records, 1)
        if cost > SHARE / 2 and self._num_records > _EARLY_RECORDS:
            self._stride *= 2
        elif cost < SHARE / 8 and self._stride > 1:
            self._stride //= 2

    def _measured(self, work: Callable[[], Any]) -> Any:
        before = time.thread_time()
        try:
            return work()
        finally:
            self.spent_s += time.thread_time() - before

    def _known(self, status: RunStatus) -> dict[str, Any]:
        """Facts of the run other than numbers, as in a window that is read from disk."""
        return {
            **self._facts,
            "model": self._structure,
            "dtypes": {f"{site.kind}/{site.name}": site.dtype for site in self._sites.values()},
            "shapes": {f"{site.kind}/{site.name}": site.shape for site in self._sites.values()},
            "config": self._content.get("config") or {},
            "environment": self._content.get("environment") or {},
            "status": status,
            "events": self._events,
        }

    def _event(self, found: Diagnosis, type: str, message: str, severity: Any, **details: Any) -> Event:
        step = found.window.last_step
        return Event(type=type, message=message, severity=severity, step=step, time=time.time(), details=details)


def _row(number: int, finding: Finding) -> FindingRow:
    values = finding.as_dict()
    kept = ("rule", "severity", "confidence", "step", "last_step", "sites", "message", "evidence", "remedy")
    return FindingRow(number=number, time=time.time(), **{name: values[name] for name in kept})
