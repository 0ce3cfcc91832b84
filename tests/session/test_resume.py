"""Which run `resume=` continues; one that is being written is refused, with its writer and what to do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sonde
from sonde.errors import NotARunError, RunLockedError, RunNotFoundError

HOLD = """
import sys, sonde
session = sonde.init(project="test", name=sys.argv[1], dir="runs", verbose=False)
for step in range(3):
    session.log({"loss": step})
    session.step()
session.flush()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def held(own_folder: Path) -> Iterator[Any]:
    """A process that writes a run; it is gone when the test ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, "held"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.communicate()


def record(begin: Any, name: str | None = None, steps: int = 3, **options: Any) -> Any:
    session = begin(name=name, **options)
    for _ in range(steps):
        session.log({"loss": session.step_number})
        session.step()
    session.finish()
    return session


@pytest.mark.slow
@pytest.mark.parametrize("how", [True, "held", "test/held", "folder", "runs/latest", "latest"])
def test_a_run_that_is_being_written_is_refused(how: Any, held: Any, begin: Any) -> None:
    path = sonde.open("runs/latest").path
    says = rf"{path.name} is being written by another process, {held.pid} on {socket.gethostname()}.*kill {held.pid}"
    with pytest.raises(RunLockedError, match=says + r".*omit resume=.*resume=\"project/name\""):
        begin(resume=str(path) if how == "folder" else how)
    assert len(sonde.runs("runs")) == 1, "no new run was begun in its place"
    assert sonde.open("runs/latest").status == "running"


@pytest.mark.slow
def test_an_older_run_is_not_taken_for_the_one_that_is_being_written(begin: Any, own_folder: Path) -> None:
    older = record(begin, "older")
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, "newer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(RunLockedError, match="newer"):
            begin(resume=True)
        assert record(begin, resume="older").path == older.path
        assert record(begin, "older", resume=True).path == older.path
    finally:
        child.kill()
        child.communicate()
    assert record(begin, resume=True).path.name.endswith("newer"), "a killed process holds nothing"


def test_the_newest_run_of_the_project_is_resumed(begin: Any) -> None:
    record(begin, "a")
    newest = record(begin, "b")
    record(begin, "c", project="other")
    again = record(begin, resume=True)
    assert again.path == newest.path
    assert sonde.open(newest.path).last_step == 5


@pytest.mark.parametrize("how", ["name", "project/name", "id", "folder name", "path", "Path", "relative"])
def test_a_run_is_resumed_by_whatever_names_it(how: str, begin: Any) -> None:
    wanted = record(begin, "wanted")
    record(begin, "newer")
    given = {
        "name": "wanted",
        "project/name": "test/wanted",
        "id": sonde.open(wanted.path).id,
        "folder name": wanted.path.name,
        "path": str(wanted.path),
        "Path": wanted.path,
        "relative": os.path.relpath(wanted.path),
    }
    assert record(begin, resume=given[how]).path == wanted.path
    assert sonde.open(wanted.path).last_step == 5


def test_a_resumed_run_does_not_follow_latest_to_the_next(begin: Any, tmp_path: Path) -> None:
    first = record(begin, "first")
    session = begin(resume=tmp_path / "runs" / "latest")
    from sonde.write.folder import create_run

    create_run(tmp_path / "runs", project="test", name="second")
    session.log({"loss": 7.0})
    session.finish()
    assert session.path == first.path
    assert sonde.open(first.path).scalars("loss").num_rows == 4


def test_with_nothing_to_resume_a_new_run_begins_and_says_so(begin: Any, capfd: Any) -> None:
    session = begin(resume=True, verbose=True)
    assert session.step_number == 0
    assert "no run of test to resume in runs: starting a new one" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["nothing", "test/nothing", "runs/test/nothing"])
def test_a_name_that_no_run_has_is_an_error(how: str, begin: Any) -> None:
    record(begin, "there")
    with pytest.raises(RunNotFoundError, match="sonde list"):
        begin(resume=how)


def test_a_folder_that_is_not_a_run_is_an_error(begin: Any, tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        begin(resume=tmp_path)


def test_a_session_of_this_process_is_named_as_such(begin: Any, tmp_path: Path) -> None:
    from sonde.config import Settings
    from sonde.session.entry import current

    session = begin(name="open")
    with pytest.raises(RunLockedError, match=r"an open session in this process. Call its finish\(\)"):
        current.begin(Settings.load(dir=tmp_path / "runs", project="test", verbose=False), resume=True)
    session.finish()
