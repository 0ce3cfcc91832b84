"""Killed at any point, every acknowledged checkpoint loads, and none is seen by halves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from sonde.tune import CheckpointManager

HERE = Path(__file__).parent
FOREVER = """
import os, sys, torch
from torch import nn
from sonde.tune import CheckpointManager

def save_forever():
    net = nn.Linear(300, 300)
    manager = CheckpointManager(sys.argv[1], model=net, interval=1, keep_last=2, background=sys.argv[2] == "background")
    print("ready", os.getpid(), flush=True)
    for step in range(1, 100000):
        net.weight.data.fill_(step)
        manager.step(step)
        if sys.argv[2] != "background":
            print(step, flush=True)

for _ in sys.stdin:  # a process to kill for each line; torch is imported once for all
    child = os.fork()
    if child == 0:
        save_forever()
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def check(folder: Path, acknowledged: int, kept: int = 2) -> None:
    """Everything visible is whole and holds its step's numbers; the newest is the last acknowledged one or the next."""
    shape = (300, 300) if folder.name == "forever" else (4, 4)
    net = nn.Linear(*shape)
    manager = CheckpointManager(folder, model=net)
    assert manager.verify() == {}
    steps = [found.step for found in manager.list()]
    assert not acknowledged or steps[-1] >= acknowledged
    assert len(steps) >= min(acknowledged, kept)
    for step in steps:
        manager.restore(step)
        assert torch.equal(net.weight, torch.full(shape, float(step)))
    manager.save(999_999)  # and it continues, clearing what the dead process left
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.fault
@pytest.mark.timeout(1500)
def test_a_crash_at_every_second_system_call(tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "child_crash.py"), str(tmp_path), "0", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = int(done.stdout)
    assert last > 60
    for point in range(0, last + 1, 2):
        acknowledged = [int(line) for line in (tmp_path / f"{point}.ack").read_text().splitlines()]
        if (tmp_path / str(point)).exists():
            check(tmp_path / str(point), max(acknowledged, default=0))
        else:
            assert not acknowledged


@pytest.mark.fault
@pytest.mark.parametrize("mode", ["plain", "background"])
def test_kill_9_at_random(tmp_path, mode):
    chance = random.Random(5)
    folder = tmp_path / "forever"
    last = 0
    command = [sys.executable, "-c", FOREVER, str(folder), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for _ in range(4):
            print("next", file=server.stdin, flush=True)
            word, pid = server.stdout.readline().split()
            assert word == "ready"
            time.sleep(chance.uniform(0.0, 0.5))
            os.kill(int(pid), signal.SIGKILL)
            acknowledged = [int(line) for line in iter(server.stdout.readline, "gone\n")]
            if folder.exists():
                check(folder, max(acknowledged, default=0))
            last = max(last, *acknowledged, 0)
            for found in CheckpointManager(folder, model=nn.Linear(1, 1)).list():
                CheckpointManager(folder).delete(found.step)
        server.stdin.close()
    assert mode == "background" or last > 3
