"""A run whose snapshots go elsewhere: training is as it was, and the run says how far the upload is."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.errors import MissingPackageError, RunLockedError, UnknownNameError
from sonde.read.tensors.stores import open_tensor_store, upload_state
from sonde.write.tensors.push import push


def train(
    folder: Path, num_steps: int = 4, *, after: Callable[[int, Path], None] | None = None, **watching: Any
) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.init(project="p", dir=folder) as session:
        sonde.watch(model, optimizer, **watching)
        for step in range(4):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if after is not None:
                after(step, Path(session.path))
    return Path(session.path)


@pytest.mark.slow
def test_a_run_with_a_repository_says_what_is_there(tmp_path: Path) -> None:
    run = train(tmp_path, snapshots=sonde.Snapshots(when=sonde.every(1), store="icechunk"))
    facts = json.loads((run / "run.json").read_text())["facts"]["snapshots"]
    assert facts["upload"] == {"url": "icechunk", "waiting": 0, "uploaded": facts["taken"], "last_error": ""}
    reader = open_tensor_store(run, branch="main")
    assert len(reader.steps) == facts["taken"] >= 4
    assert reader.read(reader.steps[-1], "param/weight").shape == (2, 4)


def until_it_failed(step: int, run: Path) -> None:
    """Before the last steps: wait until an upload was tried."""
    end = time.monotonic() + 60
    while step == 2 and not getattr(upload_state(run), "last_error", ""):
        assert time.monotonic() < end, "it was never tried"
        time.sleep(0.05)


@pytest.mark.slow
def test_what_still_waits_at_the_end_is_reported_though_nothing_failed_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as connections:  # never answers
        silent.settimeout(60.0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        waits = {"close_s": 0.1, "linger_s": 0.0, "timeout_s": 60.0}
        run = train(tmp_path, snapshots=sonde.Snapshots(when=2, store="s3://bucket/runs", options=waits))
        assert re.search(
            r"2 snapshots are not uploaded to s3://bucket/runs.*snapshot --upload", capsys.readouterr().err
        )
        connections.enter_context(silent.accept()[0])  # the run's uploader has the lock before it connects
        with pytest.raises(RunLockedError, match="the run's own uploader is still uploading 2 snapshots"):
            push(run)  # it holds the lock until the server goes away


@pytest.mark.slow
def test_a_dead_network_is_reported_and_costs_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: refused at once
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        plan = sonde.Snapshots(
            when=sonde.every(1), store="s3://bucket/runs", options={"close_s": 1.0, "linger_s": 0.0, "timeout_s": 5.0}
        )
        run = train(tmp_path, snapshots=plan, after=until_it_failed)
    assert re.search(r"cannot be uploaded to s3://bucket/runs.*snapshot --upload", capsys.readouterr().err)
    facts = json.loads((run / "run.json").read_text())["facts"]["snapshots"]
    assert facts["failed"] == 0
    assert facts["upload"]["waiting"] == facts["taken"] >= 4
    assert facts["upload"]["last_error"]
    assert len(open_tensor_store(run).steps) == facts["taken"]
    (warning,) = sonde.open(run).warnings
    assert re.search(r"snapshots are on this disk and not yet at s3://bucket/runs.*`sonde snapshot --upload`", warning)


def test_an_unknown_store_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match='Did you mean "icechunk"'):
        train(tmp_path, snapshots=sonde.Snapshots(store="icechunks"))


def test_a_store_that_is_not_installed_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sonde.write.tensors import spooled

    monkeypatch.setattr(spooled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'sonde-ml\[tensors\]'"):
        train(tmp_path, snapshots=sonde.Snapshots(store="s3://bucket/runs"))
