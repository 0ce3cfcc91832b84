"""Separates the findings that the user has muted. They are counted and can be shown, never dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from sonde.diagnose.finding import Finding
from sonde.schema.mutes import Mute
from sonde.schema.names import matches


@dataclass(frozen=True, slots=True)
class Muted:
    """A finding that is not shown, and why."""

    finding: Finding
    mute: Mute

    def as_dict(self) -> dict[str, Any]:
        return {**self.finding.as_dict(), "mute": self.mute.as_dict()}


def separate(findings: Sequence[Finding], mutes: Iterable[Mute], today: date) -> tuple[list[Finding], list[Muted]]:
    """Findings to show, and muted ones. A consequence of a muted finding is shown: it may be what matters."""
    active = [mute for mute in mutes if mute.is_active(today)]
    shown: list[Finding] = []
    muted: list[Muted] = []
    for finding in findings:
        mute = _mute_of(finding, active)
        if mute is None:
            shown.append(finding)
        else:
            muted.append(Muted(finding, mute))
    hidden = {(one.finding.rule, one.finding.sites) for one in muted}
    return [_without(finding, hidden) for finding in shown], muted


def _mute_of(finding: Finding, mutes: Sequence[Mute]) -> Mute | None:
    return next((mute for mute in mutes if matches(mute.rule, finding.rule) and _is_place(finding, mute)), None)


def _is_place(finding: Finding, mute: Mute) -> bool:
    if not mute.sites:
        return True
    return bool(finding.sites) and all(any(matches(glob, site) for glob in mute.sites) for site in finding.sites)


def _without(finding: Finding, hidden: set[tuple[str, tuple[str, ...]]]) -> Finding:
    kept = tuple(symptom for symptom in finding.cause_of if (symptom.rule, symptom.sites) not in hidden)
    return finding if len(kept) == len(finding.cause_of) else replace(finding, cause_of=kept)
