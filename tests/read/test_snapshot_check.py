"""`run.verify()` of whole tensors: a flipped bit anywhere in a snapshot is reported with its step."""

from __future__ import annotations

import zipfile
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


def flip(path: Path, key: str) -> None:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(key)
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + len(key) + info.file_size // 2] ^= 1
    path.write_bytes(data)


def test_what_is_whole_is_not_complained_of(run: Run) -> None:
    assert run.verify() == []


@pytest.mark.parametrize("kind", ["param", "grad"])
def test_a_flipped_bit_in_a_tensor_is_reported_with_its_step(kind: str, run: Run) -> None:
    flip(run.path / "tensors" / "step-000000010.zarr.zip", f"{kind}/w/c/0/0")
    (problem,) = run.verify()
    assert problem.startswith("the snapshot of step 10: tensor")
    assert f"{kind}/w" in problem


@pytest.mark.parametrize("key", ["param/w/zarr.json", "param/zarr.json"])
def test_a_flipped_bit_that_only_other_readers_would_meet_is_reported(key: str, run: Run) -> None:
    flip(run.path / "tensors" / "step-000000010.zarr.zip", key)
    (problem,) = run.verify()
    assert problem.startswith(f"the snapshot of step 10: {key} in step-000000010.zarr.zip is damaged")


def test_a_truncated_file_is_reported(run: Run) -> None:
    path = run.path / "tensors" / "step-000000000.zarr.zip"
    path.write_bytes(path.read_bytes()[:-30])
    (problem,) = run.verify()
    assert problem.startswith("the snapshot of step 0:")


@pytest.mark.slow
def test_a_document_that_still_reads_but_is_another_is_reported(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    with sonde.init(dir=tmp_path) as session:
        session.watch(model)
        session.snapshot()
        path = session.path
    assert path is not None
    assert Run(path).verify() == []
    archive = path / "tensors" / "step-000000000.zarr.zip"
    with zipfile.ZipFile(archive) as before:
        entries = {key: before.read(key) for key in before.namelist()}
    with zipfile.ZipFile(archive, "w") as after:
        for key, data in entries.items():
            after.writestr(key, data + b"\n" if key == "zarr.json" else data)
    assert Run(path).verify() == ["the document of the snapshot of step 0 differs from the one that was acknowledged"]
