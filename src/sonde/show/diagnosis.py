"""A diagnosis in words: verdicts, counts and dictionaries that the commands print. Draws nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.diagnose.diagnosis import Diagnosis
from sonde.diagnose.finding import Finding
from sonde.run import Run
from sonde.show.term.number import counted

_WORDS: Final = {
    "critical": ("critical", "critical"),
    "warning": ("warning", "warnings"),
    "info": ("remark", "remarks"),
}


def diagnosis_dict(run: Run, found: Diagnosis) -> dict[str, Any]:
    """What `sonde diagnose --json` says."""
    return {
        "id": run.id,
        "project": run.project,
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "last_step": run.last_step,
        "health": health_of(found),
        "counts": found.counts(),
        "findings": [finding.as_dict() for finding in found.findings],
        "num_rules": found.num_rules,
        "blind_rules": list(found.blind),
        "failed_rules": list(found.failed),
        "not_recorded": [gap.as_dict() for gap in found.gaps],
        "warnings": run.warnings,
    }


def anomaly_dicts(found: Diagnosis) -> list[dict[str, Any]]:
    """Findings one by one, each with the finding that explains it; in order of their first step."""
    causes = {_key(symptom): root.rule for root in found.roots for symptom in root.cause_of}
    rows = []
    for finding in found.findings:
        row = {"type": finding.rule, **finding.as_dict(), "caused_by": causes.get(_key(finding))}
        rows.append({key: value for key, value in row.items() if key not in ("rule", "cause_of")})
    return sorted(rows, key=lambda row: (row["step"], row["type"]))


def _key(finding: Finding) -> tuple[Any, ...]:
    return finding.rule, finding.sites, finding.step


def health_of(found: Diagnosis) -> float | None:
    """The newest score of the run; None when nothing was measured."""
    last = found.health.last
    return None if last != last else round(last, 1)


def counts_in_words(counts: Mapping[str, int]) -> str:
    """How many findings of each severity.

    >>> counts_in_words({"critical": 1, "warning": 2, "info": 0})
    '1 critical, 2 warnings'
    """
    return ", ".join(f"{n} {_WORDS[key][n != 1]}" for key in _WORDS if (n := int(counts.get(key) or 0)))


def what_was_checked(found: Diagnosis) -> str:
    """How far the silence of the rules can be trusted, as one clause."""
    num_looked = found.num_rules - len(found.blind) - len(found.failed)
    steps = found.health.steps
    text = f"{num_looked} rules looked at {counted(len(steps), 'recorded step')}"
    if found.failed:
        text += f"; {len(found.failed)} failed and were skipped ({', '.join(found.failed)})"
    if found.gaps:
        missing = ", ".join(f"{gap.what} ({gap.hides})" for gap in found.gaps)
        text += f"; not checked, because not recorded: {missing}"
    elif found.blind:
        text += f"; {len(found.blind)} had nothing to look at"
    return text


def stored_diagnosis(run: Run) -> tuple[dict[str, int] | None, float | None]:
    """What the recorder itself found while training: counts by severity, and health. Reads nothing but run.json."""
    stored = run.manifest.facts.get("diagnosis")
    if not isinstance(stored, Mapping):
        return None, None
    counts = {key: value for key in _WORDS if isinstance(value := stored.get(key), int)}
    health = stored.get("health")
    return counts or None, float(health) if isinstance(health, int | float) else None
