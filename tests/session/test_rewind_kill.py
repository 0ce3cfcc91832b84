"""Killed at any moment, resumed, rewound and killed again: no step is mixed of two histories, and none has a hole."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sonde

CHILD = Path(__file__).parent / "child_rewind.py"
Made = dict[int, tuple[float, float]]


def killed(dir: Path, after_s: float, *arguments: int) -> Made:
    """Run the child until it is killed: loss and gradient norm of each step that it has made, by its own hand."""
    command = [sys.executable, str(CHILD), str(dir), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        lines = [line.split() for line in child.stdout if line.endswith("\n")]
    return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}


def check(run: sonde.Run, history: Made) -> int:
    """What is shown is the beginning of the history, each step whole. Returns the number of steps."""
    # Globs: the names are not there yet if the child was killed in its first step.
    losses, norms = run.scalars("los[s]").to_pydict(), run.stats("grad/0.w*/norm").to_pydict()
    assert losses["step"] == norms["step"] == list(range(run.last_step + 1))
    # The child may be killed between recording its last step and printing it.
    assert len(losses["step"]) <= len(history) + 1
    for step, loss, norm in zip(losses["step"], losses["value"], norms["value"], strict=True):
        if step in history:
            assert loss == history[step][0]
            assert math.isclose(norm, history[step][1], rel_tol=1e-6)
    assert not [warning for warning in run.warnings if "unfinished" not in warning]
    return len(losses["step"])


def campaign(dir: Path, seed: int) -> None:
    chance = random.Random(seed)
    histories: list[Made] = []
    for number in range(3):
        before = histories[-1] if histories else {}
        first = chance.randrange(check(sonde.open("p/n", dir=dir), before) + 1) if number else 0
        made = killed(dir, chance.uniform(0.0, 0.5), *([first] if number else []))
        run = sonde.open("p/n", dir=dir)
        if len(run._now.catalog.attempts) > len(histories):  # one that got nothing onto the disk leaves no trace
            histories.append({**{step: values for step, values in before.items() if step < first}, **made})
    check(run, histories[-1] if histories else {})
    for number, history in enumerate(histories):
        check(run.attempt(number), history)


@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(12))
def test_kill_and_rewind_campaign(tmp_path, seed):
    campaign(tmp_path / "runs", seed)
