"""Rules while training runs, where no other process can be started: announced in seconds, once, on the writer thread,
at a bounded cost, harmlessly."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.diagnose.check import all_rules
from sonde.diagnose.rule import RULES, Found, Rule, Severity
from sonde.schema.records import Event, ScalarsRecord
from sonde.schema.window import Window
from sonde.session.observers import rules as live
from sonde.session.observers import rules_process

Judge = Callable[[Window], bool]


def plant(monkeypatch: pytest.MonkeyPatch, name: str, judge: Judge, severity: str = "critical") -> list[str]:
    """A rule that finds something when `judge` says so; gives back the names of the threads it ran on."""
    threads: list[str] = []

    def function(window: Window) -> Iterator[Found]:
        threads.append(threading.current_thread().name)
        if judge(window):
            yield Found(f"{name} is planted", step=3, confidence=0.95, remedy="mend it", sites=("0",))

    monkeypatch.setitem(
        RULES,
        name,
        Rule(
            name=name,
            severity=Severity(severity),
            needs=("grad/*/norm",),
            causes=(),
            references=(),
            function=function,
        ),
    )
    return threads


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only planted rules, which another process would not know, and a check at every flush."""

    def no_process() -> None:
        raise OSError("planted: no process can be started")

    monkeypatch.setattr(rules_process, "Link", no_process)
    for name in list(all_rules()):
        monkeypatch.delitem(RULES, name)
    for name in ("FIRST_LOOK_S", "SHORTEST_PAUSE_S"):
        monkeypatch.setattr(live, name, 0.0)
    monkeypatch.setattr(live, "SHARE", 1e9)


def begin(**settings: Any) -> tuple[Any, Callable[[], None]]:
    """A session, and a function that trains one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sonde.init(project="live", dir="runs", writer={"flush_interval_s": 0.02}, **settings)
    session.watch(model, optimizer)

    def step() -> None:
        loss = model(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log({"loss": loss})

    return session, step


def train_until(step: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Train until something has happened, for a minute at most."""
    end = time.monotonic() + 60
    while not is_over():
        assert time.monotonic() < end, "it never happened"
        step()
        time.sleep(0.002)


def test_a_fault_is_announced_while_training_continues(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = plant(monkeypatch, "planted", lambda window: window.last_step >= 5)
    session, step = begin()
    run = sonde.open(session.path)
    train_until(step, lambda: run.live_findings().num_rows > 0)
    assert run.status == "running"
    (row,) = run.live_findings().to_pylist()
    assert (row["rule"], row["severity"], row["step"], row["sites"]) == ("planted", "critical", 3, '["0"]')
    train_until(step, lambda: run.live_findings()["last_step"][0].as_py() > row["last_step"])
    session.finish()
    assert set(threads) == {"sonde-writer"}
    said = [line for line in capfd.readouterr().err.splitlines() if "planted" in line]
    assert said == ["sonde: critical since step 3: planted is planted   [planted]"]
    (event,) = [e for e in run.events().to_pylist() if e["type"] == "finding"]
    assert (event["severity"], event["message"]) == ("critical", "planted is planted")
    assert run.live_findings().num_rows == 1
    assert run.manifest.facts["diagnosis"]["critical"] == 1


def test_a_fault_that_goes_away_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "passing", lambda window: 5 <= window.last_step < 60)
    session, step = begin(verbose=False)
    run = sonde.open(session.path)
    train_until(step, lambda: "finding_ended" in run.events()["type"].to_pylist())
    session.finish()
    (row,) = run.live_findings().to_pylist()
    assert row["last_step"] < 60
    assert run.manifest.facts["diagnosis"]["critical"] == 0


def test_a_rule_that_raises_is_reported_once_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(window: Window) -> bool:
        raise ValueError("planted failure")

    calls = plant(monkeypatch, "broken", raises)
    plant(monkeypatch, "sound", lambda window: window.last_step >= 5)
    session, step = begin(verbose=False)
    run = sonde.open(session.path)
    train_until(step, lambda: run.live_findings().num_rows > 0)
    session.finish()
    (event,) = [e for e in run.events().to_pylist() if e["type"] == "rule_failed"]
    assert event["message"] == "the rule broken failed and is skipped: ValueError('planted failure')"
    assert len(calls) == 1
    assert run.live_findings()["rule"].to_pylist() == ["sound"]


def test_a_short_run_is_judged_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FIRST_LOOK_S", 1e6)
    plant(monkeypatch, "mild", lambda window: True, "warning")
    session, step = begin(verbose=False, system_metrics=False)
    for _ in range(10):
        step()
    session.finish()
    run = sonde.open(session.path)
    assert run.live_findings()["rule"].to_pylist() == [f.rule for f in run.findings()] == ["mild"]
    assert run.live_findings()["last_step"].to_pylist() == [9]


def test_nothing_is_checked_when_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = plant(monkeypatch, "planted", lambda window: True)
    session, step = begin(verbose=False, live_rules=False)
    for _ in range(10):
        step()
    session.finish()
    run = sonde.open(session.path)
    assert calls == []
    assert "diagnosis" not in run.manifest.facts
    assert [f.rule for f in run.findings()] == ["planted"]


def test_an_observer_that_breaks_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(live.LiveRules, "on_item", breaks)
    session, step = begin(verbose=False)
    for _ in range(10):
        step()
    session.finish()
    run = sonde.open(session.path)
    assert run.status == "finished"
    assert run.stats("grad/*/norm", steps=9).num_rows == 4
    (event,) = [e for e in run.events().to_pylist() if e["type"] == "observer_failed"]
    assert "RuntimeError: planted" in event["message"]


def test_findings_of_a_resumed_run_are_added_to_the_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "planted", lambda window: True)
    session, step = begin(verbose=False, name="a")
    step()
    session.finish()
    resumed = sonde.init(project="live", dir="runs", resume="live/a", verbose=False)
    resumed.log({"loss": 1.0})
    resumed.finish()
    assert sonde.open(session.path).live_findings()["id"].to_pylist() == [1, 2]


def test_looks_are_as_far_apart_as_their_cost_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driven by hand, with a clock of our own: no real time passes."""
    import numpy as np

    from sonde.schema.records import ScalarsRecord

    now = [100.0]
    for clock in ("monotonic", "process_time"):
        monkeypatch.setattr(live.time, clock, lambda: now[0])
    monkeypatch.setattr(live, "SHARE", 0.003)
    rules = live.LiveRules(lambda finding: None)
    monkeypatch.setattr(rules, "_measured", lambda work: (work(), setattr(rules, "spent_s", rules.spent_s + 0.3))[0])
    looks = []
    for _ in range(1000):
        now[0] += 0.5
        one = np.array([int(now[0])])
        rules.on_item(ScalarsRecord(one.astype(np.int32), one, one * 1.0, one * 1.0))
        list(rules.poll(now[0]))
        looks.append(rules.num_looks)
    # 0.3 s of work at a share of 0.3 % is paid for by a hundred seconds; only the first look comes before it is earned.
    assert looks[-1] == 500 // 100
    assert rules.spent_s <= 0.003 * 500 + 1e-9


def test_a_value_that_stops_being_finite_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FIRST_LOOK_S", 1e9)
    monkeypatch.setattr(live, "SHARE", 1e-12)
    monkeypatch.setattr(live, "IDLE_FACTOR", 1e9)
    rules = live.LiveRules(lambda _: None)
    rules.begin({}, {}, {})
    steps = np.arange(3)
    rules.on_item(ScalarsRecord(np.zeros(3, np.int32), steps, steps * 1.0, np.ones(3)))
    assert list(rules.poll(time.monotonic())) == []
    for _ in range(live.MAX_URGENT + 5):
        rules.on_item(Event(type="nonfinite", message="NaN", step=2, time=0.0, severity="critical", details={}))
        list(rules.poll(time.monotonic()))
    assert rules.num_looks == live.MAX_URGENT


def test_numbers_logged_one_by_one_do_not_wait_in_more_memory_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FIRST_LOOK_S", 1e6)
    monkeypatch.setattr(live, "MAX_WAITING_BYTES", 1 << 19)
    rules = live.LiveRules(lambda finding: None)
    rules.begin({}, {0: "loss"}, {})
    rules._import()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for step in range(8_000):
            one = np.array([step])
            rules.on_item(ScalarsRecord(np.zeros(1, np.int32), one, one * 1.0, one * 1.0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < (1 << 20) + rules.num_bytes


def test_records_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from sonde.schema.records import Site, StatsRecord
    from sonde.schema.sketch import empty_rows

    monkeypatch.setattr(live, "FIRST_LOOK_S", 1e6)
    rules = live.LiveRules(lambda finding: None)
    rules.begin({id: Site(kind="grad", name=str(id)) for id in range(1000)}, {}, {})
    largest = 0
    for step in range(600):
        rules.on_item(StatsRecord.without_hist(step, 0.0, np.arange(1000, dtype=np.int32), empty_rows(1000)))
        largest = max(largest, rules._waiting_bytes)
    assert largest <= live.MAX_WAITING_BYTES + 1000 * 14 * 8


def test_training_is_bit_identical_with_rules_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "planted", lambda window: True)

    def weights(diagnose: bool) -> list[torch.Tensor]:
        session, step = begin(verbose=False, live_rules=diagnose)
        (watching,) = session.steps.models
        model = watching.names.model()
        for _ in range(30):
            step()
        session.finish()
        return [parameter.detach().clone() for parameter in model.parameters()] + [torch.get_rng_state()]

    assert all(torch.equal(a, b) for a, b in zip(weights(True), weights(False), strict=True))


def test_the_rules_are_not_imported_before_the_first_look(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = """
import sys, sonde
session = sonde.init(project="p", dir="runs", verbose=False)
assert not [name for name in sys.modules if name.startswith("sonde.diagnose.")]
session.finish()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
