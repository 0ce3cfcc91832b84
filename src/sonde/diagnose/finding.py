"""A finding: what is wrong, where, since when, with what confidence and evidence, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from textwrap import wrap
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.display import html_of, visible
from sonde.distribution import DOCS_URL

ORDER: Final = ("info", "warning", "critical")
MARKS: Final = {"critical": "✗", "warning": "!", "info": "·"}
_TEXT_WIDTH: Final = 100


class Severity(StrEnum):
    """How serious a finding is; severities compare by rank, also with plain strings.

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
    """Count findings by severity, most severe first.

    >>> count_severities(["info", "critical"])
    {'critical': 1, 'warning': 0, 'info': 1}
    """
    words = list(found)
    return {str(severity): words.count(severity) for severity in reversed(Severity)}


@dataclass(frozen=True, slots=True)
class Evidence:
    """A measured value that supports a finding, with its healthy range."""

    series: str
    """Name of the series or scalar it was measured from: `grad/layers.0.weight/norm`, `loss`."""
    value: float
    healthy: str = ""
    """The healthy range in words: "0.2 to 3.3"."""
    step: int | None = None
    meaning: str = ""
    """A label for the value, where the name of the series does not explain it."""


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """A series that shows a finding, downsampled."""

    series: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding:
    """One problem: what it is, where, and since which step."""

    rule: str
    severity: Severity
    confidence: float
    step: int
    """The first step at which it was seen."""
    last_step: int
    """The last step at which it was seen; the run's last step while it persists."""
    message: str
    """One sentence: what happened, where and since when. Starts with a capital and ends with a full stop."""
    sites: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    remedy: str = ""
    """Instructions to fix it; code for this model is in backticks."""
    references: tuple[str, ...] = ()
    traceback: str = ""
    """The traceback of the exception that ended the program, if the finding is about that."""
    cause_of: tuple[Finding, ...] = field(default=())
    """Other findings that this one explains."""
    chart: Chart | None = field(default=None, compare=False)
    """The series of its evidence; None if `Run.findings` did not make it or the series is too short."""

    @property
    def doc(self) -> str:
        """The page of its rule: why it happens, how to fix it, when it is wrong. Offline: `sonde explain RULE`."""
        return f"{DOCS_URL}/rules/{self.rule}.md"

    def __repr__(self) -> str:
        """The finding in words: what, when, and how to fix it."""
        facts = f"{self.severity}, confidence {100 * self.confidence:.0f} %, {span(self)}"
        head = f"{MARKS[self.severity]} {visible(self.rule)}  {facts}"
        return "\n".join([head, *_indented(self.message), *_indented(self.remedy, "fix: ")])

    def _repr_html_(self) -> str:
        return html_of(self)

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain values, for JSON."""
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
            "doc": self.doc,
            "traceback": self.traceback,
            "cause_of": [finding.as_dict() for finding in self.cause_of],
        }


def span(finding: Finding) -> str:
    """The steps of a finding, in words."""
    if finding.step == finding.last_step:
        return f"at step {finding.step:,}"
    return f"steps {finding.step:,} to {finding.last_step:,}"


def _indented(text: str, label: str = "") -> list[str]:
    """Lines that fit a terminal, under their label."""
    lines = [visible(line) for line in text.splitlines() if line]
    return [
        part
        for number, line in enumerate(lines)
        for part in wrap(
            line,
            _TEXT_WIDTH,
            initial_indent=f"  {label if not number else ' ' * len(label)}",
            subsequent_indent=f"  {' ' * len(label)}",
            break_on_hyphens=False,
        )
    ]
