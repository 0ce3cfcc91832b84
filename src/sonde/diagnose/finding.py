"""A finding: what is wrong, where, since when, how sure, what shows it, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

ORDER: Final = ("info", "warning", "critical")


class Severity(StrEnum):
    """A word that knows its rank.

    >>> Severity.CRITICAL >= "warning"
    True
    """

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        return ORDER.index(self.value)

    def __ge__(self, other: str) -> bool:
        return self.rank >= Severity(other).rank

    def __gt__(self, other: str) -> bool:
        return self.rank > Severity(other).rank

    def __le__(self, other: str) -> bool:
        return self.rank <= Severity(other).rank

    def __lt__(self, other: str) -> bool:
        return self.rank < Severity(other).rank

    def __hash__(self) -> int:
        return hash(self.value)


def count_severities(found: Iterable[str]) -> dict[str, int]:
    """How many there are of each severity, the most severe first.

    >>> count_severities(["info", "critical"])
    {'critical': 1, 'warning': 0, 'info': 1}
    """
    words = list(found)
    return {str(severity): words.count(severity) for severity in reversed(Severity)}


@dataclass(frozen=True, slots=True)
class Evidence:
    """A number that shows it, beside what is healthy."""

    series: str
    """What can be looked up: `grad/layers.0.weight/norm`, or the name of a scalar."""
    value: float
    healthy: str = ""
    """The healthy range in words: "0.2 to 3.3"."""
    step: int | None = None
    meaning: str = ""
    """What the number is, when its name does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault, at some places, from a step on."""

    rule: str
    severity: Severity
    confidence: float
    step: int
    """Since when."""
    last_step: int
    """Until when it was seen; the run's last step while it goes on."""
    message: str
    """One sentence: what, where and since when."""
    sites: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    """What to change, as code for this model where that is possible."""
    references: tuple[str, ...] = ()
    cause_of: tuple[Finding, ...] = field(default=())
    """Other findings that this one explains."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "rule": self.rule,
            "severity": str(self.severity),
            "confidence": round(self.confidence, 3),
            "step": self.step,
            "last_step": self.last_step,
            "sites": list(self.sites),
            "message": self.message,
            "evidence": [asdict(one) for one in self.evidence],
            "remedy": self.remedy,
            "references": list(self.references),
            "cause_of": [finding.as_dict() for finding in self.cause_of],
        }

    def demoted(self) -> Finding:
        """The same as a mere remark: it is explained by something else."""
        return replace(self, severity=Severity.INFO)
