"""On a busy machine no snapshot that fits is lost: a model of 50 million parameters, and two processes that do nothing
but compute. Every snapshot is bit by bit what the optimizer found."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sonde

NUM_STEPS = 4


@pytest.fixture
def busy() -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("memory", [{}, {"snapshot_mib": 500.0, "snapshot_wait_s": 600.0}], ids=["default", "for two"])
def test_every_snapshot_of_a_large_model_is_taken(begin: Any, memory: dict[str, float]) -> None:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)
    ]
    model = nn.Sequential(*blocks)
    assert sum(parameter.numel() for parameter in model.parameters()) > 50_000_000
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session, sums = begin(**memory), []
    session.watch(model, optimizer, snapshots=sonde.every(1))
    for _ in range(NUM_STEPS):
        model(torch.randn(2, 1024)).square().mean().backward()
        sums.append({name: zlib.crc32(value.numpy()) for name, value in model.state_dict().items()})
        optimizer.step()
        optimizer.zero_grad()
    session.finish()
    run = sonde.open(session.path)
    assert run.tensors.snapshots()["step"].to_pylist() == list(range(NUM_STEPS))
    for step, expected in enumerate(sums):
        found = run.tensors.snapshot(step)
        assert {name: zlib.crc32(found[f"param/{name}"]) for name in expected} == expected
    assert not [warning for warning in run.warnings if "skipped" in warning or "lost" in warning]
