"""Killed at any moment: every acknowledged snapshot is there and right, and none is half visible."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from sonde.schema.layout import row_text
from sonde.write.tensors.store import open_store

CHILD = Path(__file__).parent / "child_snapshots.py"


def kill_once(folder: Path, seconds: float, *, waits: bool) -> set[int]:
    """Train, kill, and give back the steps that were acknowledged; one at least, where it `waits` for that."""
    child = subprocess.Popen([sys.executable, str(CHILD), str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    acknowledged = {int(child.stdout.readline())} if waits else set()
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    acknowledged |= {int(line) for line in child.stdout if line.endswith("\n")}
    child.wait()
    child.stdout.close()
    return acknowledged


def check(run: Path, acknowledged: set[int]) -> set[int]:
    """The steps that can be read."""
    store = open_store("zarr", run)
    try:
        keys = [(attempt, step) for attempt in store.attempts() for step in store.steps(attempt)]
        steps = {step for _, step in keys}
        assert steps >= acknowledged
        for attempt, step in keys:
            tensors = store.read(step, attempt=attempt).tensors
            assert len(tensors) == 2 * 41
            for name, tensor in tensors.items():
                wanted = -0.5 * step if name.startswith("param/") else 1.0
                assert np.array_equal(tensor.values(), np.full(tensor.shape, wanted, np.float32)), (step, name)
    finally:
        store.close()
    connection = sqlite3.connect(run / "catalog.sqlite")
    rows = connection.execute("select * from snapshots").fetchall()
    connection.close()
    assert all(zlib.crc32(row_text(*row[:-1])) == row[-1] for row in rows)
    assert acknowledged <= {row[1] for row in rows} <= steps
    return steps


def campaign(folder: Path, seed: int, num_kills: int) -> None:
    chance = random.Random(seed)
    acknowledged: set[int] = set()
    for turn in range(num_kills):
        # Every second time from the first acknowledged one on: a slow machine would be killed before it, each time.
        acknowledged |= kill_once(folder, chance.uniform(0.0, 1.0), waits=turn % 2 == 1)
        (run,) = (folder / "kill").iterdir()
        check(run, acknowledged)


@pytest.mark.slow
def test_kill_9_leaves_every_acknowledged_snapshot_and_no_half_one(tmp_path: Path) -> None:
    campaign(tmp_path, seed=0, num_kills=3)


@pytest.mark.fault
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 9))
def test_kill_9_campaign(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, seed, num_kills=5)
