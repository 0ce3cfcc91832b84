"""`sonde snapshot`: a run that trains is asked, and says what it kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.cli.main import main
from sonde.run import open as open_run
from sonde.session.entry import current
from sonde.show import snapshot_request as verb


@pytest.fixture
def training(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A run that trains on a separate thread until the test ends."""
    monkeypatch.setattr(verb, "POLL_S", 0.01)
    model = nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = sonde.init(project="gpt", verbose=False, writer={"heartbeat_s": 0.05, "flush_interval_s": 0.02})
    session.watch(model, optimizer)
    over = threading.Event()

    def train() -> None:
        while not over.wait(0.01):
            model(torch.randn(4, 30)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    thread = threading.Thread(target=train)
    thread.start()
    yield session
    over.set()
    thread.join()
    sonde.finish()
    current.use(None)


def ask(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(["snapshot", *arguments])
    return int(ending.value.code or 0)


def test_a_live_run_says_step_and_size(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("latest") == 0
    captured = capsys.readouterr()
    assert "Snapshot of step" in captured.out
    assert "2 tensors" in captured.out
    assert "waiting" in captured.err
    assert list((training.path / "tensors").glob("step-*"))


def test_json_and_kinds(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("latest", "--kinds", "param, grad", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer["num_tensors"], answer["nbytes"]) == ("taken", 4, 2 * 4 * (30 * 20 + 20))
    assert list((training.path / "requests").iterdir()) == []


def test_an_unknown_kind_is_refused_with_the_nearest(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("latest", "--kinds", "parm") == 2
    error = capsys.readouterr().err
    assert 'Did you mean "param"?' in error
    assert "asked" not in error
    answer = verb._answer(open_run(training.path), verb._ask(training.path, ["parm"], wait=True), 30)
    assert answer["state"] == "refused"
    assert 'Did you mean "param"?' in answer["why"]


def test_what_there_is_nothing_of_is_said(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("latest", "--kinds", "probe") == 1
    assert "nothing to copy for probe: no probe batch was given" in capsys.readouterr().err


def test_without_waiting_it_only_asks(training: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("latest", "--no-wait") == 0
    assert "next step" in capsys.readouterr().err
    for _ in range(500):
        training.flush(10)
        if training.steps.snapshots.ledger.counts["taken"]:
            break
        threading.Event().wait(0.01)
    assert training.steps.snapshots.ledger.counts["taken"] == 1
    assert list((training.path / "requests").iterdir()) == []


def test_a_run_that_watches_nothing_says_so(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sonde.init(project="gpt", verbose=False, writer={"heartbeat_s": 0.05, "flush_interval_s": 0.02}):
        assert ask("latest") == 1
    assert "watches no model" in capsys.readouterr().err
    current.use(None)


def test_a_run_that_has_ended_is_refused(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sonde.init(project="gpt", verbose=False).finish()
    assert ask("latest") == 1
    said = capsys.readouterr().err
    assert "has already finished" in said
    assert "waiting" not in said
    current.use(None)


def test_a_run_that_ends_meanwhile_is_not_waited_for(
    own_folder: Path, capsys: pytest.CaptureFixture[str], until: Callable[..., None]
) -> None:
    session = sonde.init(project="gpt", verbose=False, writer={"heartbeat_s": 0.05, "flush_interval_s": 0.02})
    model = nn.Linear(2, 2)
    session.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))  # and never trains

    def end_once_asked() -> None:
        until(lambda: any((session.path / "requests").glob("*.json")))
        session.finish()

    thread = threading.Thread(target=end_once_asked)
    thread.start()
    assert ask("latest") == 1
    assert "ended before" in capsys.readouterr().err
    thread.join()
    current.use(None)
