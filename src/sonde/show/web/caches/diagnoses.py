"""Findings and health of runs, computed on request and cached until the run has new data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from sonde.diagnose.check import all_rules, check
from sonde.diagnose.diagnosis import Diagnosis
from sonde.diagnose.finding import Evidence, Finding, Severity
from sonde.diagnose.health import REQUIRED_SERIES, Health, health
from sonde.errors import CorruptError
from sonde.run import Run
from sonde.show.diagnosis import not_recorded
from sonde.show.web.caches.throttled import ThrottledAnswers
from sonde.show.web.runs import Entry

MAX_ROWS: Final = 5_000_000
"""Runs with more sketches than this are not diagnosed again; their live findings are shown."""
MAX_MERGED_ROWS: Final = 1_000_000


ENDINGS: Final = ("crashed", "out_of_memory", "killed", "disk_full", "interrupted")
"""Rules about the end of a run, which may come after the last check during training."""


@dataclass(frozen=True)
class Judged:
    """Findings and health of a run."""

    last_step: int
    source: Literal["diagnosis", "recorded"]
    findings: tuple[Finding, ...]
    make_health: Callable[[], Health]
    num_rules: int = 0
    blind: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    is_blind: bool = False
    """Whether nothing was recorded that the rules check."""
    muted: frozenset[str] = frozenset()
    """Keys of findings that `sonde.yaml`, the run or `SONDE_MUTE` mutes; they come last."""
    explained: frozenset[str] = frozenset()
    """Keys of findings that another one caused."""

    @cached_property
    def health(self) -> Health:
        """Health, computed on request: for a very long run that takes a second or two."""
        return self.make_health()


def finding_key(finding: Finding) -> str:
    """A stable key of a finding, from its rule and sites."""
    text = "\x1f".join((finding.rule, *finding.sites))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Diagnoses:
    """Diagnoses by run."""

    def __init__(self) -> None:
        self._kept: ThrottledAnswers[Judged] = ThrottledAnswers()

    def of(self, entry: Entry, run: Run) -> Judged:
        return self._kept.get(entry.id, run.revision, lambda: judge(entry, run), is_moving=run.status == "running")


def judge(entry: Entry, run: Run) -> Judged:
    """Run all rules on a run; for very long runs, use the live findings."""
    if run.num_rows > MAX_ROWS:
        return _recorded(entry, run)
    found = run.diagnosis()
    return Judged(
        last_step=run.last_step,
        source="diagnosis",
        findings=(*found.findings, *(one.finding for one in found.muted)),
        muted=frozenset(finding_key(one.finding) for one in found.muted),
        make_health=lambda: found.health,
        num_rules=found.num_rules,
        blind=found.blind,
        failed=found.failed,
        gaps=tuple(f"{gap.hides}: {not_recorded(gap)}. To record it: {gap.remedy}" for gap in found.gaps),
        is_blind=found.is_blind,
        explained=_explained(found),
    )


def _explained(found: Diagnosis) -> frozenset[str]:
    return frozenset(finding_key(symptom) for cause in found.findings for symptom in cause.cause_of)


def _recorded(entry: Entry, run: Run) -> Judged:
    with entry.open() as own:
        endings = check(own.window(()), [rule for rule in all_rules().values() if rule.name in ENDINGS])
    known = {finding.rule for finding in endings}
    findings = (*endings, *(finding for finding in recorded_findings(run) if finding.rule not in known))

    def make_health() -> Health:
        with entry.open() as own:
            return health(own.window(REQUIRED_SERIES, max_rows=MAX_MERGED_ROWS), findings)

    return Judged(run.last_step, "recorded", findings, make_health)


def recorded_findings(run: Run) -> tuple[Finding, ...]:
    """Live findings in their last state, most severe first. Damaged rows are left out."""
    try:
        rows = run.live_findings().to_pylist()
    except CorruptError:  # the catalog is damaged (see the run's warnings)
        return ()
    found = {finding_key(finding): finding for row in rows if (finding := _finding(row)) is not None}
    return tuple(sorted(found.values(), key=lambda finding: (-finding.severity.rank, finding.step)))


def _finding(row: Mapping[str, Any]) -> Finding | None:
    try:
        evidence = json.loads(row["evidence"])
        return Finding(
            rule=str(row["rule"]),
            severity=Severity(row["severity"]),
            confidence=float(row["confidence"]),
            step=int(row["step"]),
            last_step=int(row["last_step"]),
            message=str(row["message"]),
            sites=tuple(str(site) for site in json.loads(row["sites"])),
            evidence=tuple(_evidence(one) for one in evidence),
            remedy=str(row["remedy"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return None


def _evidence(one: Mapping[str, Any]) -> Evidence:
    step = one.get("step")
    return Evidence(
        series=str(one["series"]),
        value=float(one["value"]),
        healthy=str(one.get("healthy", "")),
        step=None if step is None else int(step),
        meaning=str(one.get("meaning", "")),
    )
