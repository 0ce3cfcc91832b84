"""A run that keeps to its budget and says what it cost: the meter, the governor and the events together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.budget.governor import Governor
from sonde.budget.ledger import Ledger, imports_s
from sonde.budget.meter import Meter
from sonde.budget.strides import KINDS
from sonde.session.training import budget as governing
from sonde.show.coverage import overhead_sentence
from sonde.show.summary import describe


def train(session: Any, steps: int, **options: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    session.watch(model, optimizer, **options)
    for _ in range(steps):
        model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def gradient_steps(run: Any) -> list[int]:
    return sorted(set(run.stats("grad/0.weight/norm").column("step").to_pylist()))


def test_a_tiny_budget_leaves_a_few_records_of_every_kind(begin, reopen):
    train(begin(budget=1e-6, budget_seconds=0), 120)
    run = reopen()
    steps = gradient_steps(run)
    assert steps[0] == 0
    assert 3 <= len(steps) < 20
    for series in ("update/0.weight/norm", "param/0.weight/norm"):
        assert 3 <= len(run.stats(series)) < 20
    assert 1 <= len(run.stats("act/0/norm")) < 20
    assert 3 <= len(run.scalars("optim/lr")) < 20
    changes = run.events().filter([t == "cadence" for t in run.events().column("type").to_pylist()])
    assert len(changes) >= 1
    assert "to stay within the budget" in changes.column("message")[0].as_py()


def test_without_a_budget_every_step_is_recorded(begin, reopen):
    train(begin(budget=None), 60)
    assert gradient_steps(reopen()) == list(range(60))


def test_what_it_cost_is_in_the_run(begin, reopen, tmp_path: Path):
    train(begin(budget=0.5, budget_seconds=0), 120)
    overhead = reopen().manifest.facts["overhead"]
    assert set(overhead) == {
        "seconds", "elapsed_s", "spent_s", "fraction", "uncertainty", "host_fraction", "gpu_fraction",
        "stride", "parts", "snapshots_s",
    }  # fmt: skip
    assert 0 < overhead["fraction"] < 1
    assert overhead["fraction"] == pytest.approx(overhead["seconds"] / overhead["elapsed_s"], rel=1e-3)
    assert overhead["seconds"] == pytest.approx(sum(overhead["spent_s"].values()), abs=0.01)
    assert {"attach", "steps", "threads", "finish"} <= overhead["spent_s"].keys()
    assert all(overhead["spent_s"][what] > 0 for what in ("attach", "steps", "finish"))
    assert overhead["gpu_fraction"] == 0
    assert overhead["stride"].keys() >= {"grads", "optimizer", "activations"}
    json.dumps(overhead, allow_nan=False)


def test_the_end_line_and_every_view_say_what_recording_cost(begin, reopen, capfd):
    train(begin(budget=None, verbose=True), 120)
    run = reopen()
    line = (
        r"Finished: 120 steps\. (Recording took [\d.]+ m?s of [\d.]+ m?s \(\d+(\.\d)? %\))\.   Next:  sonde diagnose "
    )
    found = re.search(line, capfd.readouterr().err)
    assert found
    assert overhead_sentence(run.manifest.facts["overhead"]) == found[1]
    assert describe(run)["recording"] == found[1]


def test_a_cost_that_is_not_known_is_left_out_of_the_end_line(begin, reopen):
    session = begin(budget=None)
    train(session, 60)
    reopen()
    assert "Recording took" in session._last_line("finished")
    session.steps.training.governing.unknown = "a compiler hides it"
    overhead = session.steps.threads.facts()
    assert (overhead["seconds"], overhead["fraction"], overhead["unknown"]) == (None, None, "a compiler hides it")
    assert "Recording took" not in session._last_line("finished")


def test_everything_sonde_does_on_the_training_thread_is_in_the_account(begin, reopen):
    imports_s.append(0.25)
    session = begin()
    own_s = {"attach": session.recording.ledger.spent_by["attach"]}
    assert own_s["attach"] >= 0.25, "what was imported before is part of it"
    assert not imports_s
    train(session, 30)
    for _ in range(5):
        before_s = session.steps.training.governing.meter.host_s
        session.log({"loss": 1.0})
        assert session.steps.training.governing.meter.host_s > before_s
    assert session.recording.ledger.spent_by["attach"] > own_s["attach"], "watch() was added"
    session.flush()
    assert session.recording.ledger.thread_clock.read() > 0
    reopen()
    assert session.recording.ledger.spent_by["finish"] > 0


def test_no_work_is_counted_twice(begin, monkeypatch):
    session, others = begin(budget=None), []
    end_step = Meter.end_step
    monkeypatch.setattr(Meter, "end_step", lambda self, *a: (others.append(self._now.other_s), end_step(self, *a)))
    train(session, 30)
    assert len(others) >= 29
    assert all(seconds >= 0 for seconds in others)


def test_steps_that_may_record_nothing_are_passed_by(begin, monkeypatch):
    session = begin(budget=1e-6, budget_seconds=0)
    train(session, 200)
    (model,) = session.steps.models
    assert session.steps.rest.is_on
    assert not any((model.is_recording, model.wants_inspection, model.wants_finite, model.wants_scalars))
    session.steps.rest.wake()  # a program whose steps differ does not rest
    model.begin_step(200)
    assert model._quiet_until > 201
    seen = []
    monkeypatch.setattr(Governor, "choose", lambda *_: seen.append(1))
    model.begin_step(model._step + 1)
    assert not seen
    assert not any((model.is_recording, model.wants_inspection, model.wants_finite, model.wants_scalars))


def test_a_rewind_records_again_at_once(begin, reopen):
    session = begin(budget=1e-6, budget_seconds=0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.watch(model, optimizer)
    for step in range(300):
        if step == 200:
            session.rewind(50)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    steps = reopen().stats("grad/weight/norm").column("step").to_pylist()
    assert any(50 <= step < 60 for step in steps)
    assert not any(step >= 150 for step in steps)


def test_modules_in_parts_are_recorded_in_turn_and_the_run_says_so(begin, reopen, monkeypatch):
    monkeypatch.setattr(Governor, "_set_parts", lambda self: self.parts.update(activations=3, inspect=3))
    monkeypatch.setattr(Governor, "_wanted_strides", lambda self: dict.fromkeys(KINDS, 1.0))
    monkeypatch.setattr(Governor, "_fits", lambda self, kind: True)
    monkeypatch.setattr(Ledger, "is_ample", property(lambda self: False))  # with seconds left, but not densely
    session = begin(budget=1.0, budget_seconds=600)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(12)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    session.watch(model, optimizer, activations=True, inspect=True)
    for _ in range(120):
        model(torch.randn(8, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run = reopen()
    assert run.manifest.facts["overhead"]["parts"] == {"activations": 3, "inspect": 3}
    steps = {site: set(run.stats(f"act/{site}/norm").column("step").to_pylist()[20:]) for site in map(str, range(12))}
    assert all(len(at) >= 5 for at in steps.values()), "every module has its turn"
    assert any(not (one & other) for one in steps.values() for other in steps.values()), "and not all at once"
    inspected = {name.split("/")[1] for name in run.scalar_names if name.endswith("/row_spread")}
    assert inspected == {f"{site}.weight" for site in range(12)}


@pytest.mark.parametrize(("share", "expected"), [(0.99, "gradients only"), (0.5, "")])
def test_memory_pressure_is_reported_and_leaves_gradients(begin, reopen, monkeypatch, share, expected):
    monkeypatch.setattr(governing, "memory_shares", lambda device: [share])
    train(begin(budget=None), 120)
    run = reopen()
    messages = [m for m in run.events().column("message").to_pylist() if "memory" in m]
    assert gradient_steps(run) == list(range(120))
    assert bool(messages) == bool(expected)
    assert all(expected in m for m in messages)
    assert (len(run.stats("update/0.weight/norm")) < 60) == bool(expected)


def test_telling_batches_apart_is_not_an_inspection(begin):
    session = begin(budget=None)
    train(session, 45, inspect=sonde.every(10))
    costs = session.steps.training.governing.governor.costs.measured
    assert {step % 10 for step, _ in costs["inspect"]} == {0}
    assert len(costs["scalars"]) > 10, "it is part of the account all the same"


def perceptron() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = [torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10)), torch.randn(64, 784)


def convolutional() -> tuple[torch.nn.Module, torch.Tensor]:
    layers = [
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, stride=2),
    ]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LazyLinear(10)), torch.randn(16, 3, 16, 16)


@pytest.mark.slow
@pytest.mark.parametrize("made", [perceptron, convolutional])
def test_the_account_of_a_real_run_is_plausible(begin, reopen, made):
    model, x = made()
    model(x)
    optimizer, labels = torch.optim.Adam(model.parameters()), torch.randint(0, 10, (len(x),))
    session = begin(budget_seconds=0.5)
    session.watch(model, optimizer)
    governor = session.steps.training.governing.governor
    for _ in range(2000):
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    run = reopen()
    overhead = run.manifest.facts["overhead"]
    assert not governor.is_dense
    assert 0 < overhead["spent_s"]["steps"] < overhead["elapsed_s"]
    assert 0 < overhead["seconds"] < overhead["elapsed_s"]
    assert overhead["fraction"] == pytest.approx(overhead["seconds"] / overhead["elapsed_s"], rel=1e-3)
    assert run.last_step == 1999
    steps = gradient_steps(run)
    assert sum(step < 100 for step in steps) > sum(step >= 1900 for step in steps), "it records less later on"
