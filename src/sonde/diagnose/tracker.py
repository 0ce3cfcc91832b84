"""Findings from one check to the next: which are new, which persist and which are over. Each is announced once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from sonde.diagnose.finding import Finding, Severity

CONFIRMING_CHECKS: Final = 2
"""Number of consecutive checks after which a finding is announced; a certain, critical one is announced at once."""
MISSED_CHECKS: Final = 2
"""Number of consecutive checks without a finding after which it is over."""
SURE: Final = 0.9


@dataclass(slots=True)
class Tracked:
    """One finding over time. It gets its number when it is announced."""

    finding: Finding
    number: int = -1
    num_seen: int = 0
    num_missed: int = 0

    @property
    def is_announced(self) -> bool:
        return self.number >= 0


@dataclass(frozen=True, slots=True)
class Changes:
    """The findings that began, changed or ended with one check."""

    begun: list[Tracked]
    updated: list[Tracked]
    ended: list[Tracked]


class Tracker:
    """Follows findings over time. Two findings of one rule are the same if they share a site or neither names one."""

    def __init__(self) -> None:
        self._open: list[Tracked] = []
        self._num_announced = 0

    @property
    def open(self) -> list[Finding]:
        """Findings that were announced and are not over."""
        return [tracked.finding for tracked in self._open if tracked.is_announced]

    def look(self, findings: Sequence[Finding], *, is_last: bool = False) -> Changes:
        """Compare with the previous check. The last check announces all pending findings and ends all missing ones."""
        matched = [self._match(finding) for finding in findings]
        begun = [tracked for tracked in matched if not tracked.is_announced and (is_last or _is_ripe(tracked))]
        updated = [tracked for tracked in matched if tracked.is_announced]
        for tracked in begun:
            tracked.number = self._num_announced
            self._num_announced += 1
        ended = self._miss([tracked for tracked in self._open if tracked not in matched], is_last=is_last)
        return Changes(begun, updated, ended)

    def forget(self, step: int) -> set[str]:
        """Drop findings at or after this step, because training has returned to it; return their rules."""
        gone = [tracked for tracked in self._open if max(tracked.finding.step, tracked.finding.last_step) >= step]
        self._open = [tracked for tracked in self._open if tracked not in gone]
        return {tracked.finding.rule for tracked in gone}

    def _match(self, finding: Finding) -> Tracked:
        for tracked in self._open:
            if _is_same(tracked.finding, finding):
                # Keep the earliest known start: a window that has lost steps must not move it.
                tracked.finding = replace(finding, step=min(finding.step, tracked.finding.step))
                break
        else:
            tracked = Tracked(finding)
            self._open.append(tracked)
        tracked.num_seen += 1
        tracked.num_missed = 0
        return tracked

    def _miss(self, missed: list[Tracked], *, is_last: bool) -> list[Tracked]:
        for tracked in missed:
            tracked.num_missed += 1
        over = [t for t in missed if not t.is_announced or is_last or t.num_missed >= MISSED_CHECKS]
        self._open = [tracked for tracked in self._open if tracked not in over]
        return [tracked for tracked in over if tracked.is_announced]


def _is_ripe(tracked: Tracked) -> bool:
    finding = tracked.finding
    is_urgent = finding.severity == Severity.CRITICAL and finding.confidence >= SURE
    return is_urgent or tracked.num_seen >= CONFIRMING_CHECKS


def _is_same(a: Finding, b: Finding) -> bool:
    return a.rule == b.rule and (bool(set(a.sites) & set(b.sites)) or not (a.sites or b.sites))
