"""A diagnosis in words: verdicts, counts and dictionaries that the commands print. Draws nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.diagnose.diagnosis import Diagnosis, Gap
from sonde.diagnose.finding import Finding
from sonde.run import Run
from sonde.show.term.number import counted

_WORDS: Final = {
    "critical": ("critical", "critical"),
    "warning": ("warning", "warnings"),
    "info": ("remark", "remarks"),
}


def diagnosis_dict(run: Run, found: Diagnosis) -> dict[str, Any]:
    """The output of `sonde diagnose --json`."""
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
        "muted": [one.as_dict() for one in found.muted],
        "num_rules": found.num_rules,
        "blind_rules": list(found.blind),
        "failed_rules": list(found.failed),
        "not_recorded": [gap.as_dict() for gap in found.gaps],
        "warnings": run.warnings,
    }


def anomaly_dicts(found: Diagnosis) -> list[dict[str, Any]]:
    """All findings by first step, each with the finding that caused it."""
    causes = {_key(symptom): root.rule for root in found.roots for symptom in root.cause_of}
    rows = []
    for finding in found.findings:
        row = {"type": finding.rule, **finding.as_dict(), "caused_by": causes.get(_key(finding))}
        rows.append({key: value for key, value in row.items() if key not in ("rule", "cause_of")})
    return sorted(rows, key=lambda row: (row["step"], row["type"]))


def _key(finding: Finding) -> tuple[Any, ...]:
    return finding.rule, finding.sites, finding.step


def health_of(found: Diagnosis) -> float | None:
    """The newest health score of the run; None if nothing was measured."""
    last = found.health.last
    return None if last != last else round(last, 1)


def counts_in_words(counts: Mapping[str, int]) -> str:
    """The number of findings of each severity, in words.

    >>> counts_in_words({"critical": 1, "warning": 2, "info": 0})
    '1 critical, 2 warnings'
    """
    return ", ".join(f"{n} {_WORDS[key][n != 1]}" for key in _WORDS if (n := int(counts.get(key) or 0)))


def what_was_checked(found: Diagnosis) -> str:
    """Sentences on what the rules checked and what they could not check."""
    if found.is_blind:
        what = ", ".join(gap.what.removeprefix("the ").removeprefix("a ") for gap in found.gaps)
        return f"Not recorded: {what}."
    num_ran = found.num_rules - len(found.blind) - len(found.failed)
    sentences = [f"{counted(num_ran, 'rule')} checked {counted(len(found.health.steps), 'recorded step')}."]
    if found.failed:
        sentences.append(f"{counted(len(found.failed), 'rule')} failed and skipped: {', '.join(found.failed)}.")
    if found.gaps:
        missing = "; ".join(f"{gap.hides} ({not_recorded(gap)})" for gap in found.gaps)
        sentences.append(f"Not checked: {missing}.")
    elif found.blind:
        sentences.append(f"{counted(len(found.blind), 'rule')} had no data to check.")
    if found.muted:
        rules = ", ".join(dict.fromkeys(one.finding.rule for one in found.muted))
        sentences.append(f"{counted(len(found.muted), 'finding')} muted: {rules}.")
    return " ".join(sentences)


def verdict(found: Diagnosis) -> str:
    """The verdict on a run whose only findings are remarks. A run that crashed has a critical finding instead."""
    if found.is_blind:
        return "nothing was recorded that the rules could check"
    stopped = any(finding.rule == "interrupted" for finding in found.findings)
    muted = f", except {counted(len(found.muted), 'muted finding')}" if found.muted else ""
    return f"no problems found{' before it was interrupted' if stopped else ''}{muted}"


def not_recorded(gap: Gap) -> str:
    """The missing data of a gap, in words.

    >>> from sonde.diagnose.diagnosis import Gap
    >>> not_recorded(Gap("a validation loss", "overfitting", 'sonde.log({"val_loss": val_loss})'))
    'no validation loss recorded'
    """
    return f"no {gap.what.removeprefix('the ').removeprefix('a ')} recorded"


def stored_diagnosis(run: Run) -> tuple[dict[str, int] | None, float | None]:
    """Live findings by severity, and health, as stored in run.json.

    Both are None, for unknown, if nothing was recorded or if what they were computed from no longer exists.
    """
    stored = run.manifest.facts.get("diagnosis")
    if run.last_step < 0 or not run.catalog.is_complete:
        return None, None
    is_crash = run.status == "crashed"
    if not isinstance(stored, Mapping):
        return ({**dict.fromkeys(_WORDS, 0), "critical": 1} if is_crash else None), None
    counts = {key: value for key in _WORDS if isinstance(value := stored.get(key), int)}
    health = stored.get("health")
    if is_crash and not counts.get("critical"):  # killed before the rules could see the end
        counts, health = {**dict.fromkeys(_WORDS, 0), **counts, "critical": 1}, None
    return counts or None, float(health) if isinstance(health, int | float) else None
