"""Findings from one check to the next: announced once, updated, ended."""

from __future__ import annotations

from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.tracker import Tracker


def finding(rule: str = "a", *sites: str, severity: str = "warning", step: int = 5, last: int = 9) -> Finding:
    return Finding(
        rule=rule, severity=Severity(severity), confidence=0.95, step=step, last_step=last, message="", sites=sites
    )


def names(tracked: list) -> list[str]:
    return [one.finding.rule for one in tracked]


def test_a_finding_is_announced_at_the_second_check_and_only_then() -> None:
    tracker = Tracker()
    begun = [names(tracker.look([finding()]).begun) for _ in range(4)]
    assert begun == [[], ["a"], [], []]


def test_a_sure_and_critical_finding_is_announced_at_once() -> None:
    assert names(Tracker().look([finding(severity="critical")]).begun) == ["a"]


def test_the_last_check_announces_everything_and_ends_what_is_gone() -> None:
    tracker = Tracker()
    tracker.look([finding("a", severity="critical")])
    changes = tracker.look([finding("b")], is_last=True)
    assert (names(changes.begun), names(changes.ended)) == (["b"], ["a"])
    assert [f.rule for f in tracker.open] == ["b"]


def test_it_is_over_when_it_was_missed_twice_and_starts_over_after_that() -> None:
    tracker = Tracker()
    critical = finding(severity="critical")
    tracker.look([critical])
    assert names(tracker.look([]).ended) == []
    assert names(tracker.look([critical]).begun) == []
    assert [names(tracker.look([]).ended) for _ in range(3)] == [[], ["a"], []]
    (again,) = tracker.look([critical]).begun
    assert again.number == 1


def test_sites_that_overlap_are_one_finding_and_others_are_another() -> None:
    tracker = Tracker()
    tracker.look([finding("a", "0", "1", severity="critical")])
    changes = tracker.look([finding("a", "1", "2", severity="critical"), finding("a", "7", severity="critical")])
    assert [tracked.finding.sites for tracked in changes.updated] == [("1", "2")]
    assert [tracked.finding.sites for tracked in changes.begun] == [("7",)]


def test_a_window_that_lost_steps_does_not_move_the_beginning() -> None:
    tracker = Tracker()
    tracker.look([finding(step=5, last=9)])
    (tracked,) = tracker.look([finding(step=8, last=20)]).begun
    assert (tracked.finding.step, tracked.finding.last_step) == (5, 20)


def test_a_flicker_that_never_ripens_is_never_mentioned() -> None:
    tracker = Tracker()
    for number in range(10):
        changes = tracker.look([finding()] if number % 2 else [])
        assert [changes.begun, changes.updated, changes.ended] == [[], [], []]
