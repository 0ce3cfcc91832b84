"""Real crashes, each in its own program: every one becomes a finding that all views show."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sonde
from sonde.cli.main import app
from sonde.show import report_run

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

TRAIN = """
    import os, sys, torch, sonde
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.watch(model, optimizer, project="crash", dir="runs", verbose=False, exit_deadline_s=20)
    def fit(steps):
        for step in range(steps):
            loss = (model(torch.ones(1, 4)) - 1).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            sonde.log({"loss": loss})
        END
    fit(20)
"""
ENDS = {
    "model(torch.ones(2, 3))": ("crashed", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    "sys.exit(3)": ("crashed", "exit code 3"),
    "bytearray(1 << 60)": ("out_of_memory", "Memory ran out after step 19 in script.py, line 11, in fit"),
    "torch.empty(1 << 50)": ("out_of_memory", "tried to allocate 4,194,304 GiB"),
    "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB.')": ("out_of_memory", "20.00 MiB"),
    "session.flush(); os.kill(os.getpid(), 9)": ("killed", "disappeared after step 19"),
    "open('/dev/full', 'w').write('x' * 100000)": ("disk_full", "No space left on device"),
}


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.split("(")[0])
def test_a_crash_is_a_finding_in_every_view(end: str) -> None:
    Path("script.py").write_text(textwrap.dedent(TRAIN).replace("END", end))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    rule, said = ENDS[end]
    run = sonde.open("runs/latest")
    first = run.findings()[0]
    assert (first.rule, str(first.severity), first.step) == (rule, "critical", 19), done.stderr
    assert said in first.message
    has_traceback = rule != "killed" and "exit" not in end
    assert ("Traceback (most recent call last)" in first.traceback) == has_traceback
    assert run.health()["score"].to_pylist()[-1] is not None
    for view in (in_the_terminal(run), in_a_notebook(run), in_a_report(run)):
        assert rule in view
        assert "no problems" not in view.lower()
        assert "nothing serious" not in view.lower()
    assert run.diagnosis().health.last < 50


def in_the_terminal(run: sonde.Run) -> str:
    shown = CliRunner().invoke(app, ["diagnose", str(run.path)])
    listed = CliRunner().invoke(app, ["list", "--dir", "runs", "--json"])
    assert shown.exit_code == 1
    assert json.loads(listed.stdout)[0]["findings"]["critical"] == 1
    return shown.stdout


def in_a_notebook(run: sonde.Run) -> str:
    return run._repr_html_() + run.findings()._repr_html_()


def in_a_report(run: sonde.Run) -> str:
    report_run(run, "report.md")
    return Path("report.md").read_text().replace("\\", "")


def test_an_interruption_is_said_where_there_is_no_problem() -> None:
    Path("script.py").write_text(textwrap.dedent(TRAIN).replace("END", "raise KeyboardInterrupt"))
    subprocess.run([sys.executable, "script.py"], capture_output=True, timeout=120, check=False)
    found = sonde.open("runs/latest").diagnosis()
    assert [finding.rule for finding in found.remarks if finding.rule == "interrupted"] == ["interrupted"]
