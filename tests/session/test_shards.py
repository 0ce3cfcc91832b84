"""How a rank that holds shards finds the run of the first one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from sonde.config import Settings
from sonde.session.ranks import shards
from sonde.write.folder import create_run
from sonde.write.ranks import announce


def started(run: Path, settings: Settings, **options: Any) -> tuple[Path, dict[str, Any]]:
    return run, options


def test_a_rank_records_inside_the_run_of_the_first_from_its_step_on(tmp_path: Path) -> None:
    run = create_run(tmp_path, project="gpt", name="a")
    announce(tmp_path, run, step=40)
    folder, options = shards.begin_shards(started, Settings.load(dir=tmp_path), 3)
    assert folder == run.resolve() / "ranks" / "rank-0003"
    assert options == {"resume": True, "rank": 3, "first_step": 40}
    content = json.loads((folder / "run.json").read_text())
    assert (content["rank"], content["project"]) == (3, "gpt")


def test_the_note_of_a_job_that_crashed_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(tmp_path, project="gpt", name="a")
    note = announce(tmp_path, run)
    note.write_text(json.dumps({**json.loads(note.read_text()), "time": time.time() - 3600}))
    monkeypatch.setattr(shards, "PATIENCE_S", 0.1)
    assert shards.begin_shards(started, Settings.load(dir=tmp_path), 1) is None
    assert not (run / "ranks").exists()
