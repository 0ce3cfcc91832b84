"""Strict POSIX: the name of a new folder survives a power loss only if the folder that contains it was synced."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sonde
from sonde.schema.records import Event
from sonde.tune.checkpoint.manager import CheckpointManager
from sonde.write.durable import make_folder
from sonde.write.ranks import RankLog, Start


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The folders that were created, less those whose containing folder was synced afterwards."""
    pending: set[str] = set()
    mkdir, fsync = os.mkdir, os.fsync

    def noting_mkdir(path, *args, **keywords):
        mkdir(path, *args, **keywords)
        pending.add(str(Path(path).resolve()))

    def noting_fsync(fd):
        fsync(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            synced = os.readlink(f"/proc/self/fd/{fd}")
            pending.difference_update([path for path in pending if str(Path(path).parent) == synced])

    monkeypatch.setattr(os, "mkdir", noting_mkdir)
    monkeypatch.setattr(os, "fsync", noting_fsync)
    return pending


def test_every_folder_of_a_run_survives_a_power_loss(tmp_path, unsynced):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dir = tmp_path / "a" / "new" / "folder"
    with sonde.watch(model, optimizer, dir=dir, snapshots=sonde.every(2), verbose=False) as session:
        for _ in range(4):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        session.flush()
        CheckpointManager(model=model, optimizer=optimizer).save(4)
    run = Path(session.path)
    RankLog(run, 1).write(Event(type="note", message="early", step=2, time=1000.0), Start(1000.0, None))
    assert (run / "ranks").is_dir()
    lost = sorted(path for path in unsynced if Path(path).exists() and Path(path).is_relative_to(tmp_path))
    assert lost == []


def test_a_folder_of_folders_is_synced_from_the_top(tmp_path, unsynced):
    make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert unsynced == set()


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "a" / "b")
