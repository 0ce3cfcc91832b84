"""The tables of LayerClaw point at what exists: `sample_path` at tensors, `checkpoint_id` at a row of `checkpoints`."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.tune import CheckpointManager

STEPS = 12


def train(folder: Path, *, snapshots: Any = None, keep_last: int | None = None, **watch: Any) -> Any:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with sonde.init(project="test", dir=folder, verbose=False) as session:
        session.watch(model, optimizer, snapshots=snapshots, **watch)
        manager = CheckpointManager(session, model=model, interval=3, keep_last=keep_last) if keep_last else None
        for step in range(STEPS):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if manager is not None:
                manager.step(step + 1, {})
    return sonde.open(session.path)


def sample_paths(run: Any) -> dict[int, str | None]:
    rows = run.sql("select step, checkpoint_id, sample_path from checkpoints order by step").to_pylist()
    assert all(row["checkpoint_id"] == row["step"] for row in rows)
    return {row["step"]: row["sample_path"] for row in rows}


def test_a_run_without_tensors_names_none(tmp_path: Path) -> None:
    assert sample_paths(train(tmp_path)) == dict.fromkeys(range(STEPS))


def test_snapshots_are_named_where_they_are(tmp_path: Path) -> None:
    run = train(tmp_path, snapshots=sonde.every(4))
    found = {step: path for step, path in sample_paths(run).items() if path}
    assert sorted(found) == run.tensors.snapshots()["step"].to_pylist()
    assert len(found) >= 3
    for step, path in found.items():
        assert zipfile.is_zipfile(path)
        assert f"{step:09d}" in path
    Path(found[0]).unlink()
    assert sample_paths(sonde.open(run.path))[0] is None


def test_checkpoints_that_were_deleted_are_not_named(tmp_path: Path) -> None:
    run = train(tmp_path, keep_last=2)
    found = {step: path for step, path in sample_paths(run).items() if path}
    kept = {row["step"]: row["path"] for row in run.checkpoints().to_pylist()}
    assert found == kept
    assert len(kept) == 2
    assert all((Path(path) / "model.safetensors").is_file() for path in found.values())


def test_a_checkpoint_in_another_folder_is_named_while_it_is_there(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    with sonde.init(project="test", dir=tmp_path / "runs", verbose=False) as session:
        sonde.log({"loss": 1.0})
        saved = CheckpointManager(tmp_path / "kept", model=model).save(5)
    run = sonde.open(session.path)
    assert sample_paths(run) == {0: None, 5: str(saved.path)}
    shutil.rmtree(tmp_path / "kept")
    assert sample_paths(sonde.open(session.path)) == {0: None}


@pytest.mark.slow
def test_a_snapshot_in_a_repository_is_named_by_its_address(tmp_path: Path) -> None:
    run = train(tmp_path, snapshots=sonde.Snapshots(when=sonde.every(6), store="icechunk"))
    found = {step: path for step, path in sample_paths(run).items() if path}
    assert sorted(found) == run.tensors.snapshots()["step"].to_pylist()
    assert set(found.values()) == {str(run.path / "icechunk")}
    assert (run.path / "icechunk").is_dir()


def test_every_checkpoint_id_is_that_of_a_row(tmp_path: Path) -> None:
    run = train(tmp_path, when=sonde.every(5), activations=False)
    known = set(run.sql("select checkpoint_id from checkpoints")["checkpoint_id"].to_pylist())
    for table in ("gradient_stats", "system_metrics", "anomalies"):
        ids = run.sql(f"select checkpoint_id from {table}")["checkpoint_id"].to_pylist()
        assert {id for id in ids if id is not None} <= known
    assert set(run.sql("select checkpoint_id from gradient_stats")["checkpoint_id"].to_pylist()) == {0, 5, 10}


def test_a_reading_of_the_machine_before_anything_was_recorded_has_no_checkpoint(tmp_path: Path) -> None:
    with sonde.init(project="test", dir=tmp_path, verbose=False, writer={"system_interval_s": 0.05}) as session:
        while not sonde.open(session.path).sql("select * from system_metrics").num_rows:
            session.flush()
    rows = sonde.open(session.path).sql("select checkpoint_id from system_metrics").to_pylist()
    assert rows
    assert all(row["checkpoint_id"] is None for row in rows)
