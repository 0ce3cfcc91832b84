"""Run all rules over a window, skip those that fail, and sort causes before their consequences."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Final

import numpy as np

from sonde.diagnose import rules as rules_package
from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.rule import RULES, Rule
from sonde.display import warn
from sonde.schema.window import Window

GROUP: Final = "sonde.rules"
"""The group of entry points in which other packages name the modules of their rules."""


@cache
def all_rules() -> Mapping[str, Rule]:
    """Every rule, by name. A rule registers itself when its file in `rules/` is imported, or its module of another
    package; one of this program, when it is defined."""
    for module in sorted(info.name for info in pkgutil.iter_modules(rules_package.__path__)):
        importlib.import_module(f"{rules_package.__name__}.{module}")
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            entry.load()
        except Exception as error:  # noqa: BLE001 - a package that is broken must not take our own rules away
            warn(f"sonde: the rules of {entry.value} could not be loaded: {error!r}")
    return RULES


def required_series() -> tuple[str, ...]:
    """The patterns of the series that rules read, without duplicates."""
    return tuple(dict.fromkeys(pattern for rule in all_rules().values() for pattern in rule.needs))


def check(
    window: Window,
    rules: Iterable[Rule] | None = None,
    *,
    on_error: Callable[[str, Exception], None] | None = None,
) -> list[Finding]:
    """Run the rules and return their findings, most likely root cause first. Rules that raise are reported, skipped."""
    findings: list[Finding] = []
    for rule in all_rules().values() if rules is None else rules:
        try:
            with np.errstate(all="ignore"):  # NaN is neither a finding nor worth a warning
                findings.extend(rule(window))
        except Exception as error:
            if on_error is None:
                raise
            on_error(rule.name, error)
    return ranked(findings)


def ranked(findings: list[Finding]) -> list[Finding]:
    """Sort root causes first, each with the findings it explains. Symptoms come last; inferred ones become info."""
    explained: dict[int, list[Finding]] = {}
    symptoms: set[int] = set()
    for cause in findings:
        own = [other for other in findings if other is not cause and _explains(cause, other)]
        explained[id(cause)] = own
        symptoms.update(id(other) for other in own)
    roots = [f for f in findings if id(f) not in symptoms]
    if findings and not roots:  # a cycle of three or more: take the first in order as the root
        roots = [min(findings, key=_order)]
        symptoms.discard(id(roots[0]))
    roots = [replace(f, cause_of=tuple(_demoted(s) for s in explained[id(f)])) for f in roots]
    rest = [_demoted(f) for f in findings if id(f) in symptoms]
    return [*sorted(roots, key=_order), *sorted(rest, key=_order)]


def _explains(cause: Finding, other: Finding) -> bool:
    """Whether one finding explains another. If each could explain the other, the first in order does."""
    if not _may_explain(cause, other):
        return False
    return not _may_explain(other, cause) or _order(cause) <= _order(other)


def _may_explain(cause: Finding, other: Finding) -> bool:
    if cause.rule not in RULES or cause.severity < "warning":
        return False
    known = RULES.get(other.rule)
    return RULES[cause.rule].explains(known) if known is not None else other.rule in RULES[cause.rule].causes


def _demoted(finding: Finding) -> Finding:
    is_measured = finding.rule in RULES and RULES[finding.rule].is_measured
    return finding if is_measured or finding.severity == Severity.INFO else replace(finding, severity=Severity.INFO)


def _order(finding: Finding) -> tuple[float, ...]:
    """Sort key: severity, then confidence, then the earlier start."""
    return (-finding.severity.rank, -finding.confidence, -len(finding.cause_of), finding.step)
