"""The test suite for rules. To test a new one, write one class with a window that has the fault and one that has not.

class TestMyRule(RuleTests):
    rule = my_rule

    def faulty(self):
        return Window(scalars={"loss": (np.arange(50), np.linspace(1.0, 9.0, 50))})

    def healthy(self):
        return Window(scalars={"loss": (np.arange(50), np.linspace(1.0, 0.1, 50))})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from sonde.diagnose.check import check
from sonde.diagnose.finding import Finding
from sonde.diagnose.rule import RULES, Rule
from sonde.schema.names import parse_series, split_pattern
from sonde.schema.window import Column, Window

_ODD: Mapping[str, Callable[[Column], Column]] = {
    "no values": lambda c: (c[0][:0], c[1][:0]),
    "one value": lambda c: (c[0][:1], c[1][:1]),
    "NaN": lambda c: (c[0], np.full(len(c[0]), np.nan)),
    "infinity": lambda c: (c[0], np.full(len(c[0]), np.inf)),
    "zeros": lambda c: (c[0], np.zeros(len(c[0]))),
    "gaps": lambda c: (c[0][::7], c[1][::7]),
}


class RuleTests:
    """Subclass it, name the rule, and make two windows."""

    rule: ClassVar[Rule]
    accompanied_by: ClassVar[frozenset[str]] = frozenset()
    """Other rules that may also find something in the faulty window."""

    def faulty(self) -> Window:
        raise NotImplementedError

    def healthy(self) -> Window:
        """Nearly the same, without the fault."""
        raise NotImplementedError

    def found(self, window: Window) -> list[Finding]:
        return check(window, [self.rule])

    def test_the_rule_is_registered_and_says_what_it_finds(self) -> None:
        assert RULES[self.rule.name] is self.rule
        assert self.rule.meaning.partition("\n")[0].endswith("."), "the first line of its docstring is a sentence"
        for pattern in self.rule.needs:
            split_pattern(pattern)

    def test_the_fault_is_found_with_evidence_and_a_remedy(self) -> None:
        window = self.faulty()
        found = self.found(window)
        assert found, "the faulty window has no finding"
        for finding in found:
            assert finding.message[:1].isupper()
            assert finding.message.endswith("."), finding.message
            assert finding.remedy, "a finding says what to do"
            assert 0 < finding.confidence <= 1
            assert -1 <= finding.step <= finding.last_step <= window.last_step
            assert finding.evidence, "a finding shows what it is based on"

    def test_the_healthy_window_has_no_finding(self) -> None:
        assert [finding.message for finding in self.found(self.healthy())] == []

    def test_no_other_rule_is_needed_for_the_fault(self) -> None:
        names = {finding.rule for finding in check(self.faulty())}
        assert self.rule.name in names
        assert names <= {self.rule.name} | self.accompanied_by | set(self.rule.causes)

    def test_a_window_is_only_read(self) -> None:
        window, twin = self.faulty(), self.faulty()
        first = [finding.as_dict() for finding in self.found(window)]
        assert [finding.as_dict() for finding in self.found(window)] == first, "the same window, another answer"
        for mine, theirs in ((window.series, twin.series), (window.scalars, twin.scalars)):
            assert list(mine) == list(theirs)
            for name in mine:
                np.testing.assert_array_equal(mine[name], theirs[name])  # type: ignore[index]

    @pytest.mark.parametrize("odd", [*_ODD, "nothing", "no facts"])
    def test_odd_windows_do_no_harm(self, odd: str) -> None:
        for window in (self.faulty(), self.healthy()):
            self.found(_spoilt(window, odd))


def _spoilt(window: Window, odd: str) -> Window:
    if odd == "nothing":
        return Window()
    if odd == "no facts":
        return replace(window, facts={})
    change = _ODD[odd]
    return Window(
        {name: change(column) for name, column in window.series.items()},
        {name: change(column) for name, column in window.scalars.items()},
        window.facts,
    )


def window_of(series: Mapping[str, Any], **facts: Any) -> Window:
    """A window from lists: names with two slashes are series (`grad/0.weight/norm`), all others scalars."""
    columns = {name: (np.arange(len(values)), np.asarray(values, float)) for name, values in series.items()}
    return Window(
        {parse_series(name): column for name, column in columns.items() if name.count("/") == 2},
        {name: column for name, column in columns.items() if name.count("/") != 2},
        facts,
    )
