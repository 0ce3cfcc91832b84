"""Rules in a separate process: the same findings, nothing lost with the process, and no process left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn

import sonde
from sonde.schema.layout import RunStatus
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord, SystemSample
from sonde.schema.sketch import GRAD_UPDATE, MAX, MIN, NUM_FIELDS, SUM, SUMABS, SUMSQ, SUMSQ_RAW, N, empty_rows
from sonde.session.observers import rules as live
from sonde.session.observers.messages import Inbox, encode, receive, send
from sonde.session.observers.rules import LiveRules
from sonde.session.observers.rules_process import RulesProcess
from sonde.session.observers.rules_worker import Answer
from sonde.write.items import Document, Facts, FindingRow, NewAttempt, NewScalar, NewSite

NUM_SITES = 6
END = 60.0


def stats(step: int, norm: float) -> StatsRecord:
    rows = empty_rows(NUM_SITES)
    rows[:, N], rows[:, SUM], rows[:, SUMABS], rows[:, MIN], rows[:, MAX] = 100, 0.0, norm, -norm, norm
    rows[:, SUMSQ] = rows[:, SUMSQ_RAW] = norm**2 * np.logspace(-12, 0, NUM_SITES)
    rows[:, GRAD_UPDATE] = np.nan
    return StatsRecord.without_hist(step, float(step), np.arange(NUM_SITES, dtype=np.int32), rows)


def scalar(step: int, value: float) -> ScalarsRecord:
    return ScalarsRecord(np.zeros(1, np.int32), np.array([step]), np.array([float(step)]), np.array([value]))


def a_run() -> list[Any]:
    """Every kind of item, and a loss that explodes after training has returned to an earlier step."""
    items: list[Any] = [NewScalar(0, "loss"), Document("model.json", {"modules": [], "class": object})]
    items += [NewSite(id, Site(kind="grad", name=f"layers.{id}.weight", shape=(10, 10))) for id in range(NUM_SITES)]
    items += [Facts({"optimizer": "SGD", "dtype": torch.float32}), Facts({"config": {"lr": torch.tensor(1.0)}}, True)]
    for step in range(200):
        items += [stats(step, 1.0 + step / 100), scalar(step, 2.0 if step < 120 else 2.0 * 1.3 ** (step - 120))]
        if step % 50 == 0:
            items.append(SystemSample(time=float(step), step=step, values={"memory_percent": 10.0}))
        if step == 60:
            items.append(NewAttempt(step=40, after=60, time=0.0))
            items += [item for at in range(40, 60) for item in (stats(at, 1.5), scalar(at, 2.0))]
    items.append(Event(type="nonfinite", message="NaN", step=199, time=0.0, severity="critical", details={"x": object}))
    return items


def judged(observer: Any, items: list[Any], said: list[Any], status: RunStatus = "finished") -> list[Any]:
    observer.begin({}, {}, {"config": {}, "environment": {}, "user": object})
    for item in items:
        observer.on_item(item)
    outputs = list(observer.poll(time.monotonic()))
    outputs += observer.finish(status)
    return [said, *map(without_times, outputs)]


def without_times(output: Any) -> Any:
    if isinstance(output, FindingRow):
        return output.number, output.rule, output.severity, output.step, output.last_step, output.sites, output.message
    if isinstance(output, Event):
        return output.type, output.message, output.severity, output.step
    return {name: value for name, value in output.facts["diagnosis"].items() if name != "spent_s"}


def test_a_process_finds_what_the_rules_find_here() -> None:
    """One check each, at the end, over the same items."""
    here: list[Any] = []
    expected = judged(LiveRules(here.append, first_look_s=1e9), a_run()[:-1], here)
    there: list[Any] = []
    process = RulesProcess(there.append, lambda: None)
    process._start_at = 0.0
    found = judged(process, a_run()[:-1], there)
    assert process._link is not None
    # It checked once more when it was started, so what is found only twice in a row may come earlier there.
    assert set(map(repr, found)) >= set(map(repr, expected))
    assert any(isinstance(output, tuple) and output[0] == "finding" for output in expected)


def test_the_process_ends_by_itself_once_it_has_given_its_last_answer() -> None:
    """Python's own shutdown waits for the thread that reads the pipe, then aborts; the end of the run waited too."""
    process, _ = started()
    list(process.finish("finished"))
    assert process._link is not None
    assert process._link._process.returncode == 0


def test_a_run_that_is_over_before_the_first_check_starts_no_process() -> None:
    said: list[Any] = []
    process = RulesProcess(said.append, lambda: None)
    found = judged(process, a_run()[:-1], said)
    here: list[Any] = []
    assert found == judged(LiveRules(here.append, first_look_s=1e9), a_run()[:-1], here)
    assert process._link is None


def test_a_non_finite_value_starts_the_process_at_once() -> None:
    process = RulesProcess(lambda _: None, lambda: None)
    process.begin({}, {}, {})
    for item in a_run():
        process.on_item(item)
    list(process.poll(time.monotonic()))
    assert process._link is not None
    list(process.finish("finished"))


def started(say: Callable[[Any], None] = lambda _: None, end: float | None = None) -> tuple[RulesProcess, int]:
    process = RulesProcess(say, lambda: end)
    process.begin({}, {}, {})
    process._start_at = 0.0
    process.on_item(scalar(0, 1.0))
    list(process.poll(time.monotonic()))
    assert process._link is not None
    return process, process._link._process.pid


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + END
    while not is_true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def with_nan(steps: range) -> list[Any]:
    """From step 120 on the loss is NaN."""
    return [
        item for step in steps for item in (stats(step, 1.5), scalar(step, np.nan if step >= 120 else 100.0 - step))
    ]


def test_an_answer_about_steps_abandoned_meanwhile_is_not_passed_on() -> None:
    """Training returns to an earlier step while the process still checks the abandoned ones."""
    said: list[Any] = []
    process = RulesProcess(said.append, lambda: None)
    process.begin({}, {}, {})
    process._start_at = 0.0
    for item in [*a_run()[: NUM_SITES + 4], *with_nan(range(200)), a_run()[-1]]:
        process.on_item(item)
    assert list(process.poll(time.monotonic())) == []
    link = process._link
    assert link is not None
    assert link._process.stdout is not None
    assert select.select([link._process.stdout], [], [], END)[0]
    process.on_item(NewAttempt(step=100, after=200, time=0.0))
    for item in with_nan(range(100, 110)):
        process.on_item(item)
    outputs = [*process.poll(time.monotonic()), *process.finish("finished")]
    assert said == []
    assert [output for output in outputs if isinstance(output, FindingRow | Event)] == []
    assert outputs[-1].facts["diagnosis"]["step"] == 109  # type: ignore[union-attr]


def test_a_finding_before_the_step_that_training_returns_to_is_passed_on() -> None:
    said: list[Any] = []
    process = RulesProcess(said.append, lambda: None)
    process._returns = [300, 250]
    judged(LiveRules(said.append, first_look_s=0.0), a_run()[:-1], said)
    answer = Answer([], list(said), num_returns=0)
    assert process._still_true(answer).to_say == said != []
    process._returns.append(150)
    assert process._still_true(answer).to_say == []
    assert process._still_true(replace(answer, num_returns=3)).to_say == said


def test_facts_that_wait_do_not_add_up() -> None:
    process = RulesProcess(lambda _: None, lambda: None)
    process.begin({}, {}, {})
    for number in range(1000):
        process.on_item(Facts({"watching": number, f"of {number % 2}": number}))
    assert process._take() == [Facts({"watching": 999, "of 0": 998, "of 1": 999})]
    assert process._take() == []


def test_a_process_that_is_killed_is_reported_once() -> None:
    process, pid = started()
    os.kill(pid, signal.SIGKILL)
    outputs: list[Any] = []

    def has_noticed() -> bool:
        process.on_item(scalar(1, 1.0))
        outputs.extend(process.poll(time.monotonic()))
        return bool(outputs)

    wait_for(has_noticed)
    outputs += [*process.poll(time.monotonic()), *process.finish("finished")]
    (event,) = [output for output in outputs if isinstance(output, Event)]
    assert event.type == "observer_failed"
    assert event.message == "live findings are switched off: their process ended with exit code -9"
    assert not psutil.pid_exists(pid)


def test_a_failure_in_the_process_is_reported() -> None:
    process, pid = started()
    process.on_item("nonsense")  # type: ignore[arg-type]
    outputs: list[Any] = []
    wait_for(lambda: bool(outputs.extend(process.poll(time.monotonic())) or outputs))
    assert [output.type for output in outputs] == ["observer_failed"]
    assert "AttributeError" in outputs[0].message
    assert not psutil.pid_exists(pid)


def test_a_process_that_hangs_delays_neither_the_writer_nor_the_end() -> None:
    process, pid = started(end=time.monotonic() + 1.0)
    os.kill(pid, signal.SIGSTOP)
    for step in range(50):
        process.on_item(big(step))
        assert list(process.poll(time.monotonic())) == []
    (event,) = process.finish("finished")
    assert isinstance(event, Event)
    assert "the last check took too long" in event.message
    assert not psutil.pid_exists(pid)


def big(step: int) -> StatsRecord:
    """A megabyte, more than a pipe holds."""
    num = (1 << 20) // (8 * NUM_FIELDS)
    return StatsRecord.without_hist(step, 0.0, np.arange(num, dtype=np.int32), empty_rows(num))


def test_what_waits_for_a_hanging_process_is_bounded_and_other_items_are_kept() -> None:
    process, pid = started(end=time.monotonic())
    os.kill(pid, signal.SIGSTOP)
    for step in range(50):
        process.on_item(big(step))
        process.on_item(scalar(step, 1.0))
    assert process._waiting_bytes <= live.MAX_WAITING_BYTES + 50 * 1000
    assert len([item for item in process._items if isinstance(item, ScalarsRecord)]) == 50
    list(process.finish("finished"))


def test_the_process_outlives_ctrl_c_but_not_the_training_process(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
import numpy as np
from sonde.session.observers.rules_process import RulesProcess
from sonde.schema.records import ScalarsRecord
process = RulesProcess(print, lambda: None)
process.begin({}, {}, {})
process._start_at = 0.0
process.on_item(ScalarsRecord(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(1), np.zeros(1)))
list(process.poll(time.monotonic()))
child = os.fork()  # like the worker of a data loader, it holds the pipes open
if not child:
    time.sleep(300)
print(process._link._process.pid, child, flush=True)
time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    rules, worker = map(int, parent.stdout.readline().split())
    try:
        wait_for(lambda: signal.SIGTERM in ignored(rules))
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(rules, number)
        time.sleep(0.1)
        assert is_running(rules)
        parent.kill()
        parent.wait()
        wait_for(lambda: not is_running(rules))
        assert is_running(worker)
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.stdout.close()


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def ignored(pid: int) -> set[int]:
    """The signals that a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn")]
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


def test_the_process_imports_no_torch() -> None:
    code = "import sonde.session.observers.rules_worker, sonde.diagnose.check as c, sys; c.all_rules(); "
    code += "assert not {'torch', 'pyarrow', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_real_run_is_judged_in_the_process_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "FIRST_LOOK_S", 1e9)  # NaN is not kept waiting
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session = sonde.init(project="live", dir="runs", writer={"flush_interval_s": 0.02}, config={"dtype": torch.float16})
    session.watch(model, optimizer)
    run = sonde.open(session.path)

    def step() -> bool:
        if session.step_number == 20:
            model[2].weight.data[0, 0] = torch.nan
        loss = model(torch.randn(16, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log({"loss": loss})
        return run.live_findings().num_rows > 0

    wait_for(step)
    assert run.status == "running"
    (process,) = [p for p in psutil.Process().children() if "rules_worker" in " ".join(p.cmdline())]
    assert process.nice() >= 10
    session.finish()
    assert not process.is_running()
    (found,) = [row for row in run.live_findings().to_pylist() if row["rule"] == "nan_inf"]
    (expected,) = [finding for finding in run.findings() if finding.rule == "nan_inf"]
    assert (found["step"], found["severity"], found["message"]) == (expected.step, "critical", expected.message)
    assert set(run.live_findings()["rule"].to_pylist()) >= {finding.rule for finding in run.findings()}
    said = [line for line in capfd.readouterr().err.splitlines() if "[nan_inf]" in line]
    assert len(said) == 1


def test_messages_are_the_same_on_the_other_side() -> None:
    read, write = os.pipe()
    message = [stats(3, 1.0), np.arange(1000)[::2], "text", np.empty(0), {"a": np.float64(1.5)}]
    send(write, message)
    with os.fdopen(read, "rb") as file:
        found = receive(file)
        os.close(write)
        with pytest.raises(EOFError):
            receive(file)
    np.testing.assert_array_equal(found[0].rows, message[0].rows)
    np.testing.assert_array_equal(found[1], message[1])
    assert found[2:3] + found[4:] == ["text", {"a": 1.5}]
    assert found[3].shape == (0,)


def test_an_inbox_gives_messages_as_soon_as_they_are_complete() -> None:
    data = b"".join(b"".join(encode(message)) for message in ("one", np.arange(3), "three"))
    inbox = Inbox()
    found = [[str(message) for message in inbox.add(data[at : at + 1])] for at in range(len(data))]
    assert [message for messages in found for message in messages] == ["one", "[0 1 2]", "three"]
    assert found[-1] == ["three"]
