"""`sonde checkpoints`: lists, verifies and deletes them, in a run's folder or any other."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest


def write(folder: Path, *steps: int) -> None:
    """Checkpoints as they are on disk, without torch."""
    from sonde.schema.checkpoints import Manifest
    from sonde.write.checkpoints import locked, write_checkpoint

    with locked(folder):
        for step in steps:
            manifest = Manifest(step=step, time=1.7e9 + step, metrics={"eval_loss": 1 / step})
            write_checkpoint(folder, manifest, {"state.json": lambda path: path.write_text("{}") and None})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "kept", 1, 2, 3)
    return tmp_path / "kept"


def test_of_a_run_and_of_a_folder(sonde: Any, make_run: Any, folder: Path) -> None:
    run = make_run()
    write(run / "checkpoints", 5, 10)
    assert [row["step"] for row in sonde("checkpoints", "latest", "--json").json] == [5, 10]
    rows = sonde("checkpoints", folder, "--json").json
    assert [(row["step"], row["metrics"], row["problems"]) for row in rows][1] == (2, {"eval_loss": 0.5}, [])
    text = sonde("checkpoints", folder).stdout
    assert "eval_loss 0.5" in text
    assert text.count("complete") == 3


def test_verify_finds_the_damaged_one(sonde: Any, folder: Path) -> None:
    assert "verified" in sonde("checkpoints", folder, "--verify").stdout
    (folder / "step-000000002" / "state.json").write_text("{ ")
    assert sonde("checkpoints", folder).code == 0
    rows = sonde("checkpoints", folder, "--verify", "--json", code=1).json
    assert [row["problems"] for row in rows] == [[], ["state.json does not match its sha256"], []]


def test_delete_asks_and_names_what_is_there(sonde: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Available steps: 1, 2, 3" in sonde("checkpoints", folder, "--delete", "7", "--yes", code=1).stderr
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "Add --yes" in sonde("checkpoints", folder, "--delete", "1", code=2).stderr
    sonde("checkpoints", folder, "--delete", "1", "--delete", "3", "--yes")
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "step-000000002"]


def test_a_folder_that_is_being_written_is_left_alone(sonde: Any, folder: Path) -> None:
    from sonde.write.checkpoints import locked

    with locked(folder):
        assert "is being saved" in sonde("checkpoints", folder, "--delete", "1", "-y", code=1).stderr
    assert (folder / "step-000000001").is_dir()


def test_a_manifest_of_somebody_else_is_named(sonde: Any, folder: Path) -> None:
    (folder / "step-000000003" / "manifest.json").write_text(json.dumps({"format": 1}))
    (row,) = [row for row in sonde("checkpoints", folder, "--json", code=1).json if row["step"] == 3]
    assert "does not match its checksum" in row["problems"][0]


def test_nothing_there(sonde: Any, make_run: Any) -> None:
    make_run()
    assert "No checkpoints in" in sonde("checkpoints", "latest").stderr
