"""The suite for rules: one of ours passes, one of a program does, and each planted fault is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sonde.diagnose.rule import RULES, Evidence, Found, Rule, Window, rule
from sonde.diagnose.rules.loss_divergence import loss_divergence
from sonde.testing import RuleTests, window_of

STEPS = np.arange(200)


class TestLossDivergence(RuleTests):
    rule = loss_divergence
    accompanied_by = frozenset({"loss_plateau", "lr_too_high", "underfitting", "loss_spikes"})

    def faulty(self) -> Window:
        return window_of({"loss": np.concatenate([np.linspace(2.0, 0.5, 80), np.linspace(0.5, 50.0, 120)])})

    def healthy(self) -> Window:
        return window_of({"loss": 2.0 * 0.97**STEPS + 0.1})


@pytest.fixture
def low_accuracy() -> Iterator[Rule]:
    """A rule as a program defines it."""

    @rule(severity="warning")
    def low_accuracy(window: Window) -> Iterator[Found]:
        """Accuracy stays at chance."""
        steps, values = window.get("accuracy")
        if len(values) >= 100 and np.nanmax(values, initial=-np.inf) < 0.2:
            yield Found(
                "Accuracy never exceeded 20 %.",
                step=int(steps[0]),
                confidence=0.9,
                remedy="Check the labels.",
                evidence=(Evidence("accuracy", float(values[-1]), "above 0.2"),),
            )

    yield low_accuracy
    del RULES["low_accuracy"]


def suite(of: Rule, **changed: Any) -> RuleTests:
    windows = {
        "rule": of,
        "faulty": lambda self: window_of({"accuracy": np.full(200, 0.1)}),
        "healthy": lambda self: window_of({"accuracy": np.linspace(0.1, 0.9, 200)}),
    }
    return type("Suite", (RuleTests,), windows | changed)()


def run_all(suite: RuleTests) -> None:
    suite.test_the_rule_is_registered_and_says_what_it_finds()
    suite.test_the_fault_is_found_with_evidence_and_a_remedy()
    suite.test_the_healthy_window_has_no_finding()
    suite.test_no_other_rule_is_needed_for_the_fault()
    suite.test_a_window_is_only_read()
    for odd in ("no values", "one value", "NaN", "infinity", "zeros", "gaps", "nothing", "no facts"):
        suite.test_odd_windows_do_no_harm(odd)


def test_a_rule_of_a_program_passes(low_accuracy: Rule) -> None:
    run_all(suite(low_accuracy))


def broken(function: Any, doc: str = "Accuracy stays at chance.") -> Rule:
    function.__doc__ = doc
    return Rule("low_accuracy", RULES["low_accuracy"].severity, (), (), (), function)


def found(**changed: Any) -> Found:
    given = {"step": 0, "confidence": 0.9, "remedy": "Look.", "evidence": (Evidence("accuracy", 0.1),)} | changed
    return Found(given.pop("message", "Accuracy is low."), **given)


@pytest.mark.parametrize(
    ("function", "test"),
    [
        (lambda window: iter(()), "test_the_fault_is_found_with_evidence_and_a_remedy"),
        (lambda window: iter([found(remedy="")]), "test_the_fault_is_found_with_evidence_and_a_remedy"),
        (lambda window: iter([found(evidence=())]), "test_the_fault_is_found_with_evidence_and_a_remedy"),
        (lambda window: iter([found(message="low accuracy")]), "test_the_fault_is_found_with_evidence_and_a_remedy"),
        (lambda window: iter([found(step=900)]), "test_the_fault_is_found_with_evidence_and_a_remedy"),
        (lambda window: iter([found()]), "test_the_healthy_window_has_no_finding"),
        (lambda window: window.get("accuracy")[1].sort() or iter(()), "test_a_window_is_only_read"),
    ],
)
def test_a_fault_is_found(low_accuracy: Rule, function: Any, test: str) -> None:
    falling = {"faulty": lambda self: window_of({"accuracy": np.linspace(0.19, 0.1, 200)})}
    planted = broken(function)
    with pytest.raises(AssertionError):
        getattr(suite(planted, **falling), test)()


def test_a_rule_that_raises_on_an_odd_window_is_found(low_accuracy: Rule) -> None:
    planted = broken(lambda window: iter([found(step=int(window.get("accuracy")[0][0]))]))
    with pytest.raises(IndexError):
        suite(planted).test_odd_windows_do_no_harm("nothing")


def test_a_rule_without_a_sentence_is_found(low_accuracy: Rule) -> None:
    with pytest.raises(AssertionError):
        suite(broken(low_accuracy.function, "TODO")).test_the_rule_is_registered_and_says_what_it_finds()
