"""Checkpoints of two trainings never share a folder, and training never resumes from another's."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import sonde
from sonde.errors import UsageError
from sonde.tune import CheckpointManager
from sonde.tune.train.output import check_same, open_output
from sonde.write.checkpoints import write_link


def filled(folder: str = "out") -> Path:
    manager = CheckpointManager(folder, model=nn.Linear(2, 2), interval=1)
    for step in (1, 2):
        manager.step(step)
    (Path(folder) / "final").mkdir()
    return Path(folder)


def test_a_folder_in_use_is_left_alone():
    folder = filled()
    with pytest.raises(UsageError, match=r"an earlier training \(at 1, 2\).*resume=True.*overwrite=True"):
        open_output(folder, resume=False, overwrite=False)
    assert [found.step for found in open_output(folder, resume=True, overwrite=False)] == [1, 2]


def test_overwriting_deletes_what_the_other_training_made():
    folder = filled()
    (folder / "notes.txt").write_text("mine")
    assert open_output(folder, resume=False, overwrite=True) == []
    assert CheckpointManager(folder).list() == []
    assert not (folder / "final").exists()
    assert (folder / "notes.txt").exists()


def test_a_folder_that_cannot_be_made_is_named():
    Path("file").write_text("")
    with pytest.raises(UsageError, match="cannot create output_dir file: File exists"):
        open_output(Path("file"), resume=False, overwrite=False)


def test_another_method_is_noticed_before_the_run_is_opened_again(tmp_path):
    config = {"model": {"name": "m"}, "method": {"name": "lora", "r": 8}}
    with sonde.init(project="p", dir=tmp_path, config=config) as session:
        pass
    write_link(Path("out"), session.path)
    assert check_same(Path("out"), config)["method"]["r"] == 8
    with pytest.raises(UsageError, match=r"saved with method.r = 8, but it is now 16"):
        check_same(Path("out"), {**config, "method": {"name": "lora", "r": 16}})
    assert sonde.open(session.path).status == "finished"
    assert check_same(Path("elsewhere"), config) == {}
