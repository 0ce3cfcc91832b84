"""`run.verify()` of whole tensors: a flipped bit anywhere in a snapshot is told with its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import sonde
from sonde.run import Run

Keep = Callable[[Mapping[int, Mapping[str, np.ndarray]]], Run]


@pytest.fixture
def run(keep_snapshots: Keep) -> Run:
    weight = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32)
    return keep_snapshots({step: {"param/w": weight + step, "grad/w": weight * step} for step in (0, 10)})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_whole_is_not_complained_of(run: Run) -> None:
    assert run.verify() == []


@pytest.mark.parametrize("name", ["param.float32/c/0", "grad.float32/c/0"])
def test_a_flipped_bit_in_a_tensor_is_told_with_its_step(name: str, run: Run) -> None:
    flip(run.path / "tensors" / "step-000000010" / name)
    (problem,) = run.verify()
    assert problem.startswith("the snapshot of step 10: tensor")
    assert f"{name.partition('.')[0]}/w" in problem


def test_a_missing_file_is_told(run: Run) -> None:
    (run.path / "tensors" / "step-000000000" / "param.float32" / "c" / "0").unlink()
    (problem,) = run.verify()
    assert problem.startswith("the snapshot of step 0:")


@pytest.mark.slow
def test_a_document_that_still_reads_but_is_another_is_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with sonde.init(dir=tmp_path) as session:
        session.watch(model)
        session.snapshot()
        path = session.path
    assert path is not None
    assert Run(path).verify() == []
    document = path / "tensors" / "step-000000000" / "zarr.json"
    document.write_bytes(document.read_bytes() + b"\n")
    assert Run(path).verify() == ["the document of the snapshot of step 0 is not the one that was acknowledged"]
