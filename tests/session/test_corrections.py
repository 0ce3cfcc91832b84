"""A live message that turns out wrong is corrected by a later one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from sonde.diagnose.finding import Finding, Severity
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord, sign_document, to_json
from sonde.schema.sketch import NAN, N, empty_rows
from sonde.session.observers.rules import Announcement, Change, LiveRules
from sonde.write.items import NewScalar, NewSite
from sonde.write.ranks import RankEvents, RankLog, Start


def check(rules: LiveRules) -> None:
    rules._is_urgent, rules._num_urgent = True, 0
    list(rules.poll(time.monotonic()))


def nonfinite(site: str, **details: Any) -> Event:
    return Event(
        type="nonfinite", message="NaN", step=3, time=0.0, severity="critical", details={"site": site, **details}
    )


def running(said: list[Announcement]) -> LiveRules:
    rules = LiveRules(said.append, first_look_s=1e9)
    rules.begin({}, {}, {})
    rules.on_item(NewScalar(0, "loss"))
    rules.on_item(NewSite(0, Site(kind="grad", name="0.weight", shape=(2, 2))))
    for step in range(8):
        rows = empty_rows(1)
        rows[:, N], rows[:, NAN] = 4, 4 * (step >= 3)  # the average over all ranks
        loss = np.array([1.0])
        rules.on_item(StatsRecord.without_hist(step, float(step), np.zeros(1, np.int32), rows))
        rules.on_item(ScalarsRecord(np.zeros(1, np.int32), np.array([step]), np.array([float(step)]), loss))
    return rules


def test_nan_from_another_rank_corrects_the_origin_that_this_one_saw() -> None:
    said: list[Announcement] = []
    rules = running(said)
    check(rules)
    check(rules)
    assert [(one.finding.rule, one.change, one.finding.sites) for one in said] == [
        ("nan_inf", Change.NEW, ("0.weight",))
    ]
    rules.on_item(nonfinite("embed", role="input", came_with_data=True, rank=1))
    check(rules)
    check(rules)
    (last,) = [one for one in said[1:] if one.finding.rule == "nan_inf"]
    assert (last.change, last.finding.sites) == (Change.CORRECTED, ("embed",))
    assert "rank 1" in last.finding.message


def finding(severity: str = "warning", rule: str = "planted", **more: Any) -> Finding:
    given = {"confidence": 0.8, "step": 1, "last_step": 5, "message": "", **more}
    return Finding(rule=rule, severity=Severity(severity), **given)


def changes(*checks: list[Finding]) -> list[tuple[str, Change]]:
    """What is printed for the findings of some checks."""
    from sonde.diagnose.check import ranked
    from sonde.diagnose.diagnosis import Diagnosis
    from sonde.diagnose.health import health
    from sonde.schema.window import Window

    said: list[Announcement] = []
    rules = LiveRules(said.append, first_look_s=1e9)
    rules._import()
    for found in checks:
        whole = Diagnosis(Window(), tuple(ranked(found)), health(Window()), 1, (), (), ())
        list(rules._changes(whole, is_last=False))
    return [(one.finding.rule, one.change) for one in said]


def test_what_is_over_is_withdrawn_once() -> None:
    assert changes([finding()], [finding()], [], [], []) == [("planted", Change.NEW), ("planted", Change.OVER)]


def test_what_persists_is_printed_once() -> None:
    assert changes(*[[finding()]] * 5) == [("planted", Change.NEW)]


def test_a_warning_that_becomes_critical_is_printed_again() -> None:
    assert changes([finding()], [finding()], [finding("critical")]) == [
        ("planted", Change.NEW),
        ("planted", Change.CORRECTED),
    ]


def test_a_finding_that_turns_out_to_be_a_consequence_is_corrected() -> None:
    symptom, root = finding(rule="underfitting"), finding("critical", rule="lr_too_high")
    printed = changes([symptom], [symptom], [symptom, root], [symptom, root])
    assert printed == [
        ("underfitting", Change.NEW),
        ("lr_too_high", Change.NEW),
        ("underfitting", Change.EXPLAINED),
    ] or printed == [("underfitting", Change.NEW), ("underfitting", Change.EXPLAINED), ("lr_too_high", Change.NEW)]


def test_the_first_rank_reads_each_event_of_another_one_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    events, log = RankEvents(tmp_path), RankLog(tmp_path, 1)
    assert events() == []
    log.write(nonfinite("0"), Start(0.0, None))
    assert [(event.type, event.step, event.details["rank"]) for event in events()] == [("nonfinite", 3, 1)]
    assert events() == []
    row = sign_document(to_json({"half": "a line"})).rstrip("\n")
    with log.path.open("a") as file:
        file.write(row)
    assert events() == []
