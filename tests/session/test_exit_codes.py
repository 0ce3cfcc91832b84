"""A program's exit code says how its run ended, wherever the exit came from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import sonde

pytestmark = pytest.mark.slow  # each is a separate program

TRAIN = """
import os, signal, sys, threading, time
from sys import exit as exit_of_before
import sonde
session = sonde.init(project="end", dir="runs", verbose=False)
def train(steps):
    for step in range(steps):
        sonde.log({"loss": step})
        sonde.step()
train(3)
"""
HANDLER = """
def stop(number, frame):
    sys.exit(128 + number)
signal.signal(signal.{name}, stop)
os.kill(os.getpid(), signal.{name})
time.sleep(30)
"""
CAUGHT = """
try:
    sys.exit(2)
except SystemExit:
    pass
"""
FAILING_CHILD = """
import multiprocessing
multiprocessing.set_start_method("fork")
child = multiprocessing.Process(target=lambda: sys.exit(8))
child.start()
child.join()
"""
ENDINGS: dict[str, tuple[str, int, str, str]] = {
    "last line": ("", 0, "finished", ""),
    "exit without a code": ("sys.exit()", 0, "finished", ""),
    "exit with 0": ("sys.exit(0)", 0, "finished", ""),
    "exit with 3": ("sys.exit(3)", 3, "crashed", "exit code 3"),
    "exit with -1": ("sys.exit(-1)", 255, "crashed", "exit code 255"),
    "exit with a text": ("sys.exit('no data')", 1, "crashed", "exit code 1: no data"),
    "raised": ("raise SystemExit(4)", 4, "crashed", "exit code 4"),
    "raised with 0": ("raise SystemExit(0)", 0, "finished", ""),
    "raised inside": (
        "def main():\n    def inner():\n        raise SystemExit(1)\n    inner()\nmain()",
        1,
        "crashed",
        "exit code 1",
    ),
    "exit()": ("exit(5)", 5, "crashed", "exit code 5"),
    "quit()": ("quit()", 0, "finished", ""),
    "imported by name": ("exit_of_before(6)", 6, "crashed", "exit code 6"),
    "argparse": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--wrong'])",
        2,
        "crashed",
        "exit code 2",
    ),
    "caught, then the last line": (CAUGHT, 0, "finished", ""),
    "caught, then raised with 0": (CAUGHT + "raise SystemExit(0)", 0, "finished", ""),
    "caught, then another": (CAUGHT + "sys.exit(7)", 7, "crashed", "exit code 7"),
    "SIGTERM, handled": (HANDLER.format(name="SIGTERM"), 143, "interrupted", "SIGTERM (exit code 143)"),
    "SIGHUP, handled": (HANDLER.format(name="SIGHUP"), 129, "interrupted", "SIGHUP (exit code 129)"),
    "130": ("sys.exit(130)", 130, "interrupted", "SIGINT (exit code 130)"),
    "raised 143": ("raise SystemExit(143)", 143, "interrupted", "SIGTERM (exit code 143)"),
    "out of memory, by its code": ("sys.exit(137)", 137, "crashed", "SIGKILL (exit code 137)"),
    "finished before": ("sonde.finish()\nsys.exit(1)", 1, "finished", ""),
    "inside with": ("with session:\n    sys.exit(3)", 3, "crashed", "exit code 3"),
    "inside with, 0": ("with session:\n    sys.exit(0)", 0, "finished", ""),
    "an error": ("raise RuntimeError('no luck')", 1, "crashed", "RuntimeError: no luck"),
    "an error in a thread": (
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()",
        0,
        "finished",
        "",
    ),
    "an exit in a thread": (
        "thread = threading.Thread(target=lambda: sys.exit(9))\nthread.start()\nthread.join()",
        0,
        "finished",
        "",
    ),
    "an error of before": (
        "import code\ncode.InteractiveInterpreter().runcode(compile('1 / 0', 'x', 'exec'))",
        0,
        "finished",
        "",
    ),
    "a forked child that fails": (
        "pid = os.fork()\nif pid == 0:\n    sys.exit(8)\nos.waitpid(pid, 0)",
        0,
        "finished",
        "",
    ),
    "a child process that fails": (
        FAILING_CHILD,
        0,
        "finished",
        "",
    ),
    "os._exit": ("session.flush()\nos._exit(3)", 3, "crashed", "the process disappeared"),
    "a hook of the user's": (
        "import atexit\natexit.register(lambda: None)\nsys.excepthook = lambda *_: None\nraise ValueError('mine')",
        1,
        "crashed",
        "ValueError: mine",
    ),
}


def run_program(code: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    Path("script.py").write_text(TRAIN + textwrap.dedent(code))
    given: dict[str, Any] = {"capture_output": True, "timeout": 120, **options}
    return subprocess.run([sys.executable, "script.py"], check=False, **given)


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_exit_code_becomes_a_status(ending: str) -> None:
    code, expected, status, reason = ENDINGS[ending]
    done = run_program(code)
    run = sonde.open("runs/latest")
    assert done.returncode == expected, done.stderr.decode()
    assert (run.status, run.reason[: len(reason) or None]) == (status, reason)
    assert run.scalars("loss").num_rows == 3
    assert [*run.warnings, *run.verify()] == []
    assert not (run.path / "ending.json").exists()


@pytest.mark.parametrize("ending", ["exit with 3", "caught, then the last line", "SIGTERM, handled", "an error"])
def test_without_help_of_the_c_library_sys_exit_is_seen(ending: str) -> None:
    code, expected, status, reason = ENDINGS[ending]
    missing = "import sonde.session.session as ours\nours.leave_exit_code = lambda run: False\n"
    assert run_program(missing + code).returncode == expected
    run = sonde.open("runs/latest")
    assert (run.status, run.reason) == (status, reason)


def test_output_without_a_reader_is_not_a_crash() -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    quiet = {"capture_output": False, "stdout": write, "stderr": subprocess.DEVNULL}
    done = run_program("print('x' * 100)", env=environment, **quiet)
    os.close(write)
    assert done.returncode == 120
    assert sonde.open("runs/latest").status == "finished"


def test_an_interrupt_inside_with_is_an_interruption() -> None:
    done = run_program("with session:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)")
    run = sonde.open("runs/latest")
    assert done.returncode in (130, -signal.SIGINT)
    assert (run.status, run.reason) == ("interrupted", "KeyboardInterrupt")


@pytest.mark.parametrize(("outcome", "status"), [("True", "finished"), ("False", "crashed")])
def test_a_session_left_open_in_pytest_ends_as_pytest_does(outcome: str, status: str) -> None:
    Path("test_it.py").write_text(TRAIN + f"\ndef test_it():\n    assert {outcome}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        capture_output=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == (outcome == "False")
    assert sonde.open("runs/latest").status == status


TRAINS = """
import sys
import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("code", "expected", "status"), [("sys.exit(3)", 3, "crashed"), ("sys.exit(0)", 0, "finished")]
)
def test_a_script_that_sonde_runs_ends_as_it_says(code: str, expected: int, status: str) -> None:
    Path("script.py").write_text(f"{TRAINS}{code}\n")
    done = subprocess.run(
        [sys.executable, "-m", "sonde.cli.main", "run", "script.py"], capture_output=True, check=False, timeout=120
    )
    run = sonde.open("runs/latest")
    assert (done.returncode, run.status) == (expected, status)


CHILD = """
import multiprocessing, sys
import sonde

def train(how):
    session = sonde.init(project="end", name=how, dir="runs", verbose=False)
    for step in range(3):
        session.log({"loss": step})
        session.step()
    if how == "raises":
        raise RuntimeError("no luck")
    if how == "exits":
        sys.exit(3)

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    for how in ("returns", "raises", "exits"):
        child = multiprocessing.Process(target=train, args=(how,))
        child.start()
        child.join()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_run_inside_a_child_of_multiprocessing_ends_as_the_child_does(method: str) -> None:
    Path("script.py").write_text(CHILD)
    subprocess.run([sys.executable, "script.py", method], capture_output=True, check=True, timeout=120)
    found = {run.name: (run.status, run.reason) for run in sonde.runs("runs")}
    assert found == {
        "returns": ("finished", ""),
        "raises": ("crashed", "RuntimeError: no luck"),
        "exits": ("crashed", "exit code 3"),
    }


def test_a_resumed_run_forgets_how_it_ended_before() -> None:
    run_program("raise SystemExit(4)")
    assert sonde.open("runs/latest").status == "crashed"
    resumed = (
        "session.finish()\nsession = sonde.init(project='end', dir='runs', resume='RUN', verbose=False)\ntrain(2)\n"
    )
    run = sonde.runs("runs")[-1]
    run_program(resumed.replace("RUN", str(run.path)))
    assert (run.status, run.reason, run.last_step) == ("finished", "", 4)
    run_program(resumed.replace("RUN", str(run.path)) + "os.kill(os.getpid(), signal.SIGKILL)")
    assert (run.status, run.reason[:23]) == ("crashed", "the process disappeared")


def test_sys_exit_is_put_back_when_the_last_session_ends(tmp_path: Path) -> None:
    before = sys.exit
    one = sonde.init(dir=tmp_path, verbose=False)
    assert sys.exit is not before
    with pytest.raises(SystemExit) as caught:
        sys.exit(3)
    assert caught.value.code == 3
    one.finish()
    assert sys.exit is before


def test_sys_exit_works_when_another_library_wraps_it_during_one_session_and_a_second_session_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wandb does, whose wrapper stays when our session ends: it calls ours, which must not call it."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    with sonde.init(dir=tmp_path, verbose=False):
        ours = sys.exit
        sys.exit = lambda status=None, /: ours(status)  # type: ignore[assignment]
    with sonde.init(dir=tmp_path, verbose=False), pytest.raises(SystemExit, match="3"):
        sys.exit(3)
