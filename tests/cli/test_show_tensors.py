"""`sonde show --tensors`: the last snapshot at a glance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.tensors.store import open_store


@pytest.fixture
def run(make_run: Any) -> Path:
    path: Path = make_run(name="a")
    store = open_store("zarr", path)
    for step in (0, 5, 10, 15):
        tensors = {
            "param/still.weight": np.ones((4, 4), np.float32),
            "param/moves.weight": np.eye(12, dtype=np.float32) * (1 + step),
            "param/bias": np.array([np.nan if step == 15 else 1.0, 2.0]),
            "grad/moves.weight": np.ones((12, 12), np.float32),
        }
        store.write(Snapshot(step, 1.0, "test", {name: HostTensor.of(value) for name, value in tensors.items()}))
    store.close()
    return path


def test_most_moved_first(sonde: Any, run: Path) -> None:
    answer = sonde("show", run, "--tensors", "param/*")
    assert "snapshot of step 15" in answer.stdout
    assert answer.stdout.index("param/moves.weight") < answer.stdout.index("param/still.weight")
    assert "1 tensor with non-finite values: param/bias" in answer.stdout
    assert "grad/" not in answer.stdout


def test_json_has_every_number(sonde: Any, run: Path) -> None:
    found = sonde("show", "latest", "--tensors", "param/*", "--at", "10", "--json").json
    assert found["step"] == 10
    moved = found["tensors"][0]
    assert (moved["kind"], moved["site"]) == ("param", "moves.weight")
    assert moved["relative_from_first"] == pytest.approx(10.0)
    assert moved["relative_change"] == pytest.approx((11 - 6) / 6)
    assert moved["stable_rank"] == pytest.approx(12.0)
    assert moved["effective_rank"] == pytest.approx(12.0)


def test_globs_and_what_is_not_there(sonde: Any, run: Path) -> None:
    assert "grad/moves.weight" in sonde("show", run, "--tensors", "grad/*", "--at", "-1", "--no-spectra").stdout
    assert "no tensor matches" in sonde("show", run, "--tensors", "act/*", code=2).stderr
    assert "The closest is 10" in sonde("show", run, "--tensors", "param/*", "--at", "11", code=2).stderr


def test_run_without_snapshots_says_how_to_take_them(sonde: Any, make_run: Any) -> None:
    make_run(name="b")
    assert "snapshots=sonde.every(500)" in sonde("show", "b", "--tensors", "param/*", code=2).stderr
