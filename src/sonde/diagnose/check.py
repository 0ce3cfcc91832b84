"""Run all rules over a window, skip those that fail, and put causes before what they explain."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from sonde.diagnose import rules as rules_package
from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.rule import RULES, Rule
from sonde.schema.window import Window


@cache
def all_rules() -> Mapping[str, Rule]:
    """Every rule, by name. Importing a file of `rules/` is what registers it."""
    for module in sorted(info.name for info in pkgutil.iter_modules(rules_package.__path__)):
        importlib.import_module(f"{rules_package.__name__}.{module}")
    return RULES


def required_series() -> tuple[str, ...]:
    """The patterns over series that rules look at, each once."""
    return tuple(dict.fromkeys(pattern for rule in all_rules().values() for pattern in rule.needs))


def check(
    window: Window,
    rules: Iterable[Rule] | None = None,
    *,
    on_error: Callable[[str, Exception], None] | None = None,
) -> list[Finding]:
    """What is wrong in this window, the most likely root first. A rule that raises is reported and skipped."""
    findings: list[Finding] = []
    for rule in all_rules().values() if rules is None else rules:
        try:
            with np.errstate(all="ignore"):  # what is not a number is not a finding, and no news either
                findings.extend(rule(window))
        except Exception as error:
            if on_error is None:
                raise
            on_error(rule.name, error)
    return ranked(findings)


def ranked(findings: list[Finding]) -> list[Finding]:
    """Roots first, each with what it explains. Symptoms come last; those that were only inferred become remarks."""
    explained: dict[int, list[Finding]] = {}
    symptoms: set[int] = set()
    for cause in findings:
        own = [other for other in findings if other is not cause and _explains(cause, other)]
        explained[id(cause)] = own
        symptoms.update(id(other) for other in own)
    roots = [f for f in findings if id(f) not in symptoms]
    if findings and not roots:  # a ring of three or more: the first in order began it
        roots = [min(findings, key=_order)]
        symptoms.discard(id(roots[0]))
    roots = [replace(f, cause_of=tuple(_demoted(s) for s in explained[id(f)])) for f in roots]
    rest = [_demoted(f) for f in findings if id(f) in symptoms]
    return [*sorted(roots, key=_order), *sorted(rest, key=_order)]


def _explains(cause: Finding, other: Finding) -> bool:
    """Of two that would explain each other, the one that comes first in order does."""
    if not _may_explain(cause, other):
        return False
    return not _may_explain(other, cause) or _order(cause) <= _order(other)


def _may_explain(cause: Finding, other: Finding) -> bool:
    causes = RULES[cause.rule].causes if cause.rule in RULES else ()
    return other.rule in causes and cause.severity >= "warning"


def _demoted(finding: Finding) -> Finding:
    is_measured = finding.rule in RULES and RULES[finding.rule].is_measured
    return finding if is_measured or finding.severity == Severity.INFO else finding.demoted()


def _order(finding: Finding) -> tuple[float, ...]:
    """What is sure and grave comes first; of equals, what began first."""
    return (-finding.severity.rank, -finding.confidence, -len(finding.cause_of), finding.step)
