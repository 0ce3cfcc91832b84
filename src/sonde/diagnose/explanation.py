"""Why a finding was made: its evidence, the other rules that were considered, and what to record to be more certain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sonde.diagnose.check import all_rules
from sonde.diagnose.confidence import origin_in_words
from sonde.diagnose.decisions import Decision, decisions
from sonde.diagnose.diagnosis import Diagnosis
from sonde.diagnose.finding import Finding
from sonde.diagnose.rule import Rule
from sonde.diagnose.wording import number
from sonde.display import html_of, visible
from sonde.schema.names import split_pattern
from sonde.schema.window import Window

RECORDED_BY: Final = {
    "act": "sonde.watch(model, activations=True)",
    "actgrad": "sonde.watch(model, activation_grads=True)",
    "grad": "sonde.watch(model, optimizer)",
    "param": "sonde.watch(model, optimizer)",
    "update": "sonde.watch(model, optimizer)",
    "optim": "sonde.watch(model, optimizer, optim=True)",
    "custom": "sonde.batch(inputs, targets)",
}
"""By the kind of a series: the call that records it."""
_EVIDENT: Final = ("data", "unit", "attn", "rnn", "model")


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another rule that could explain the finding, or that reads the same series, and what became of it."""

    rule: str
    outcome: str
    """`found`, `explained` by the finding, `rejected`, or `unknown` because its data was not recorded."""
    why: str
    """A sentence."""
    decision: Decision | None = None
    """The comparison that rejected it."""
    is_cause: bool = False
    """Whether the rule would explain the finding."""

    def as_dict(self) -> dict[str, Any]:
        decision = None if self.decision is None else self.decision.as_dict()
        return {**{n: getattr(self, n) for n in self.__slots__}, "decision": decision}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A finding with the reasons for it; it prints as text."""

    finding: Finding
    confidence: str
    """Where the confidence comes from."""
    alternatives: tuple[Alternative, ...]
    """Possible causes first, then rules that read the same series."""
    to_record: tuple[str, ...]
    """Calls that record what this rule or an alternative could not see."""

    def as_dict(self) -> dict[str, Any]:
        chart = self.finding.chart
        drawn = chart and {"series": chart.series, "steps": chart.steps.tolist(), "values": chart.values.tolist()}
        return {
            "finding": self.finding.as_dict(),
            "chart": drawn,
            "confidence_from": self.confidence,
            "alternatives": [one.as_dict() for one in self.alternatives],
            "to_record": list(self.to_record),
        }

    def __repr__(self) -> str:
        return "\n".join([repr(self.finding), *self.lines()])

    def _repr_html_(self) -> str:
        return html_of(self)

    def lines(self) -> Iterator[str]:
        """Everything but the finding itself, line by line."""
        yield f"confidence: {100 * self.finding.confidence:.0f} %, {self.confidence}"
        titles = {
            "found": "also found",
            "explained": "explained by this finding",
            "rejected": "considered and rejected",
            "unknown": "could not be checked",
        }
        for outcome, title in titles.items():
            chosen = [one for one in self.alternatives if one.outcome == outcome]
            if chosen:
                yield f"{title}:"
                yield from (f"  {one.rule}: {visible(one.why)}" for one in chosen)
        if self.to_record:
            yield "to be more certain, record:"
            yield from (f"  {call}" for call in self.to_record)
        yield f"about the rule: sonde explain {self.finding.rule}"


def explain(found: Diagnosis, finding: Finding) -> Explanation:
    """Explain one finding of a diagnosis."""
    rules = all_rules()
    own = rules.get(finding.rule)
    causes = [rule for rule in rules.values() if finding.rule in rules and rule.explains(rules[finding.rule])]
    near = [rule for rule in rules.values() if rule not in causes and rule is not own and _shares_series(rule, finding)]
    alternatives = [
        *(_alternative(found, finding, rule, is_cause=True) for rule in causes),
        *(_alternative(found, finding, rule, is_cause=False) for rule in near),
        *(
            Alternative(s.rule, "explained", s.message)
            for s in finding.cause_of
            if rules.get(s.rule) not in (*causes, *near)
        ),
    ]
    unknown = [rules[one.rule] for one in alternatives if one.outcome == "unknown"]
    missing = [
        need for rule in [*([own] if own else []), *unknown] for need in rule.needs if not found.window.names(need)
    ]
    return Explanation(finding, origin_in_words(finding.rule), tuple(alternatives), _calls(found.window, missing))


def _shares_series(rule: Rule, finding: Finding) -> bool:
    """Whether a rule declares a series that is evidence for the finding."""
    kinds = {tuple(evidence.series.split("/")[::2]) for evidence in finding.evidence if evidence.series.count("/") >= 2}
    stats = {(one[0], one[-1]) for one in kinds}
    return any((parts.kind, parts.stat) in stats for parts in map(split_pattern, rule.needs))


def _alternative(found: Diagnosis, finding: Finding, rule: Rule, *, is_cause: bool) -> Alternative:
    explained = next((symptom for symptom in finding.cause_of if symptom.rule == rule.name), None)
    other = next((one for one in found.findings if one.rule == rule.name), None)
    if explained is not None:
        return Alternative(rule.name, "explained", explained.message, is_cause=is_cause)
    if other is not None:
        return Alternative(rule.name, "found", other.message, is_cause=is_cause)
    if rule.name in found.blind:
        series = ", ".join(rule.needs)
        return Alternative(rule.name, "unknown", f"{series} was not recorded.", is_cause=is_cause)
    last = _last(rule, found.window)
    return Alternative(rule.name, "rejected", _words(rule, last), last, is_cause=is_cause)


def _last(rule: Rule, window: Window) -> Decision | None:
    """The comparison that decided. Of a loop over places, the one that came closest to the limit."""
    made = decisions(rule, window)
    if not made:
        return None
    same = [one for one in made if (one.what, one.threshold) == (made[-1].what, made[-1].threshold)]
    return min(same, key=lambda one: abs(one.value - one.limit))


def _words(rule: Rule, last: Decision | None) -> str:
    if last is None:
        return f"nothing like it was recorded ({rule.meaning.splitlines()[0].rstrip('.').lower()})."
    meaning = f" ({last.meaning.rstrip('.')})" if last.meaning else ""
    return f"{last.what} is {number(last.value)}, {last.relation} {last.threshold} = {number(last.limit)}{meaning}."


def _calls(window: Window, missing: list[str]) -> tuple[str, ...]:
    """The calls that record series that were missing, and inspections if there are none."""
    calls = [RECORDED_BY.get(split_pattern(pattern).kind, "sonde.watch(model, inspect=True)") for pattern in missing]
    if not any(name.kind in _EVIDENT for name in window.series):
        calls.append("sonde.watch(model, inspect=True)")
    return tuple(dict.fromkeys(calls))
