"""A disk whose syncs take seconds: a program ends all the same, with its rows, its status and its reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sonde

pytestmark = pytest.mark.fault

TRAIN = """
import os, signal, sys, time
import sonde
session = sonde.init(project="slow", dir="runs", verbose=False, exit_deadline_s=0.5, finish_deadline_s=300.0)
def train(steps):
    for step in range(steps):
        sonde.log({"loss": step})
        sonde.step()
train(20)
session.flush()
open(os.environ["SLOW_DISK"], "w").close()
train(20)
"""


@pytest.fixture(scope="module")
def slow_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and LD_PRELOAD")
    library = tmp_path_factory.mktemp("slow") / "slow_disk.so"
    source = Path(__file__).parents[1] / "write" / "slow_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def run_program(code: str, library: Path, seconds: int = 2) -> subprocess.CompletedProcess[str]:
    Path("script.py").write_text(TRAIN + code)
    slow = {"LD_PRELOAD": str(library), "SLOW_DISK": str(Path("slow").absolute()), "SLOW_DISK_S": str(seconds)}
    return subprocess.run(
        [sys.executable, "script.py"],
        env={**os.environ, **slow},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_finish_returns_when_records_and_status_are_there_and_does_not_wait_for_the_sealing(slow_disk: Path) -> None:
    done = run_program(
        "session.finish()\nprint(session.recording.writer.is_done, session.recording.writer._thread.is_alive())",
        slow_disk,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
    run = sonde.open("runs/latest")
    assert (run.status, run.scalars("loss").num_rows, run.warnings, run.verify()) == ("finished", 40, [], [])


def test_a_run_that_is_still_being_sealed_is_resumed_when_that_is_done(slow_disk: Path) -> None:
    again = """
session.finish()
os.unlink(os.environ["SLOW_DISK"])
session = sonde.init(project="slow", dir="runs", verbose=False, resume=True)
train(5)
"""
    done = run_program(again, slow_disk)
    assert done.returncode == 0, done.stderr
    (run,) = sonde.runs("runs")
    assert (run.status, run.last_step, run.verify()) == ("finished", 44, [])


@pytest.mark.parametrize(
    ("code", "returncode", "status", "reason"),
    [
        ("raise RuntimeError('no luck')", 1, "crashed", "RuntimeError: no luck"),
        ("sys.exit(3)", 3, "crashed", "exit code 3"),
        ("sys.exit(143)", 143, "interrupted", "SIGTERM (exit code 143)"),
        ("raise KeyboardInterrupt", -2, "interrupted", "KeyboardInterrupt"),
    ],
)
def test_a_program_that_cannot_wait_leaves_its_status_and_its_reason(
    code: str, returncode: int, status: str, reason: str, slow_disk: Path
) -> None:
    done = run_program(code, slow_disk, seconds=30)
    assert done.returncode in (returncode, 130 if returncode == -2 else returncode), done.stderr
    run = sonde.open("runs/latest")
    assert (run.status, run.reason) == (status, reason)
    assert run.scalars("loss").num_rows >= 20
    assert run.warnings == ["the process ended before everything was written: the last records may be missing"]
    again = sonde.init(project="slow", dir="runs", resume=True, verbose=False)
    again.log({"loss": 0.0}, step=100)
    again.finish()
    assert (run.status, run.warnings, run.verify()) == ("finished", [], [])
    assert not (run.path / "ending.json").exists()
