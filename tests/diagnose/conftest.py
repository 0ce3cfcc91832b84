"""Every finding that a test of this folder makes is checked: full sentences, code in backticks, correct plurals."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from sonde.diagnose.finding import Finding
from sonde.diagnose.rule import Rule
from sonde.schema.window import Window

SENTENCE = re.compile(r"[A-Z0-9][^\n]*[^\s.]\.")
# Numbers that were not formatted, plurals of one, and words that our style replaces.
CLUMSY = re.compile(
    r"\bnan\b|\binf\b|\d%|\de[+-]0\d|\.\.$|\b1 (more )?(later )?(layers|steps|units|parameters|batches|modules|pairs)\b"
    r"|\b(told|beside|behind|goes on|go on|anew|nobody|not finite|makers|of its own|stands|stood|looked at|share)\b"
)


def complaints(finding: Finding) -> list[str]:
    """What is wrong with the wording of a finding."""
    code = re.compile(r"`[^`]*`")
    remedy = code.sub("x", finding.remedy)
    labels = [text for one in finding.evidence for text in (one.meaning, one.healthy)]
    wrong = {
        "the message is not one sentence": not SENTENCE.fullmatch(finding.message),
        "the message has backticks": "`" in finding.message,
        "the remedy is not a sentence": not re.match(r"[A-Z]", remedy) or not remedy.endswith((".", "x")),
        "a backtick of the remedy is not closed": "`" in remedy,
        "code outside backticks": re.search(r"\w\(|==|\w\.\w+_\b", remedy) is not None,
        "clumsy": any(CLUMSY.search(text) for text in (finding.message, remedy, *labels)),
    }
    return [f"{finding.rule}: {what}: {finding.message} / {finding.remedy}" for what, is_so in wrong.items() if is_so]


@pytest.fixture(autouse=True)
def _every_finding_is_well_worded(monkeypatch: pytest.MonkeyPatch) -> None:
    find = Rule.__call__

    def checked(rule: Rule, window: Window) -> Iterator[Finding]:
        for finding in find(rule, window):
            if rule.function.__module__.startswith("sonde.diagnose.rules."):  # not those that tests plant
                assert complaints(finding) == []
            yield finding

    monkeypatch.setattr(Rule, "__call__", checked)
