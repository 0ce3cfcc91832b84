"""A run that keeps to its budget and says what it cost: the meter, the governor and the events together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.session.training import budget as governing


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


def test_a_tiny_budget_leaves_gradients_at_every_fourth_step(begin, reopen):
    train(begin(budget=1e-6, free_steps=0), 120)
    run = reopen()
    steps = gradient_steps(run)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 4
    assert len(run.stats("update/0.weight/norm")) < 20
    changes = run.events().filter([t == "cadence" for t in run.events().column("type").to_pylist()])
    assert len(changes) >= 1
    assert "to keep within the budget" in changes.column("message")[0].as_py()


def test_without_a_budget_every_step_is_recorded(begin, reopen):
    train(begin(budget=None), 60)
    assert gradient_steps(reopen()) == list(range(60))


def test_what_it_cost_is_in_the_run(begin, reopen, tmp_path: Path):
    train(begin(budget=0.5, free_steps=0), 120)
    overhead = reopen().manifest.facts["overhead"]
    assert set(overhead) == {"fraction", "uncertainty", "host_fraction", "gpu_fraction", "stride", "snapshots_s"}
    assert 0 < overhead["fraction"] < 1
    assert overhead["gpu_fraction"] == 0
    assert overhead["stride"].keys() >= {"grads", "optimizer", "activations"}
    json.dumps(overhead, allow_nan=False)


@pytest.mark.parametrize(("share", "expected"), [(0.99, "gradients only"), (0.5, "")])
def test_memory_pressure_is_told_and_leaves_gradients(begin, reopen, monkeypatch, share, expected):
    monkeypatch.setattr(governing, "memory_shares", lambda device: [share])
    train(begin(budget=None), 120)
    run = reopen()
    messages = [m for m in run.events().column("message").to_pylist() if "memory" in m]
    assert gradient_steps(run) == list(range(120))
    assert bool(messages) == bool(expected)
    assert all(expected in m for m in messages)
    assert (len(run.stats("update/0.weight/norm")) < 60) == bool(expected)


def test_telling_batches_apart_is_no_inspection(begin):
    session = begin(budget=None)
    train(session, 45, inspect=sonde.every(10))
    costs = session.steps.training.governing.governor._costs
    assert {step % 10 for step, _ in costs["inspect"]} == {0}
    assert len(costs[""]) > 10, "it is part of the account all the same"
