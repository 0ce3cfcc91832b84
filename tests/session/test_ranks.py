"""Several processes: the first records, the others tell it where a value stopped being finite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sonde
from sonde.read.run.ranks import rank_events
from sonde.schema.attempts import Attempt
from sonde.schema.records import Event
from sonde.write.ranks import Announced, RankLog, Start, announce, find_announced, job_name

SCRIPT = """
import math, os, sys
import torch
from torch import nn
import torch.distributed as dist
import sonde

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, guilty, bad_step, accumulate = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Planted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        spoil = rank == guilty and self.calls - 1 == bad_step * accumulate + accumulate - 1
        return self.inner(x) * (math.nan if spoil else 1.0)

torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Planted(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with sonde.watch(model, optimizer):
    torch.manual_seed(rank)
    for _ in range(bad_step + 4):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
        optimizer.step()
        sonde.log({"loss": loss})
    dist.barrier()
dist.destroy_process_group()
"""


def launch(guilty: int, step: int, accumulate: int = 1, script: str = SCRIPT) -> sonde.Run:
    Path("job.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "job.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [*command, str(guilty), str(step), str(accumulate)],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return sonde.open("latest", dir="runs")


@pytest.mark.distributed
@pytest.mark.parametrize(("guilty", "accumulate"), [(1, 1), (1, 2), (0, 1)])
def test_a_nan_is_named_on_the_rank_that_made_it(guilty: int, accumulate: int) -> None:
    run = launch(guilty, step=6, accumulate=accumulate)
    finding = next(f for f in run.findings() if f.rule == "nan_inf")
    assert (finding.step, finding.sites[0]) == (6, "2")
    assert ("rank 1" in finding.message) == (guilty == 1)
    assert ("micro-batch 1" in finding.message) == (accumulate == 2)
    assert not list(Path("runs").glob(".job-*")), "the note is gone when the run has ended"


@pytest.mark.distributed
def test_ranks_that_agree_are_not_accused() -> None:
    run = launch(guilty=7, step=12)
    assert {row["type"] for row in run.events().to_pylist()} >= {"fingerprint"}
    assert [f.rule for f in run.findings() if f.severity >= "warning"] == []


@pytest.mark.distributed
def test_a_rank_that_trains_on_its_own_is_named() -> None:
    run = launch(guilty=7, step=12, script=SCRIPT.replace("nn.parallel.DistributedDataParallel(", "("))
    finding = next(f for f in run.findings() if f.rule == "rank_desync")
    assert "rank 1" in finding.message
    assert finding.step in (1, 10)


def an_event(step: int) -> Event:
    return Event(
        type="nonfinite", message="NaN", step=step, time=float(step), severity="critical", details={"site": "2"}
    )


def test_events_of_a_rank_are_read_back_and_torn_or_damaged_lines_are_not(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 3)
    for step in range(3):
        log.write(an_event(step), Start(0.0, None))
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + lines[1].replace(b'"step": 1', b'"step": 9') + lines[2][:-20])
    found = rank_events(tmp_path)
    assert [row[1] for row in found] == [0]
    assert json.loads(found[0][5]) == {"site": "2", "rank": 3}
    assert found[0][4] == "rank 3: NaN"


def test_events_of_a_rank_belong_to_the_attempt_that_began_at_their_step(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 1, first_step=20)
    log.write(an_event(3), Start(100.2, None))  # counted from 0: it is step 23 of the run
    log.write(an_event(12), Start(200.1, 10))
    log.write(an_event(13), Start(299.9, 10))
    attempts = [
        Attempt(number=number, first_step=step, time=moment)
        for number, (step, moment) in enumerate([(0, 0.0), (20, 100.0), (10, 200.0), (10, 300.0)])
    ]
    assert [(row[1], row[-1]) for row in rank_events(tmp_path, attempts)] == [(23, 1), (12, 2), (13, 3)]


ABANDONED = SCRIPT.replace(
    "    dist.barrier()\n",
    """    model.load_state_dict(before)
    sonde.rewind(3)
    for _ in range(bad_step + 1):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        sonde.log({"loss": loss})
    dist.barrier()
""",
).replace("with sonde.watch", "import copy\nbefore = copy.deepcopy(model.state_dict())\nwith sonde.watch")
RESUMED = "sonde.init(resume=True).watch(model, optimizer)"


@pytest.mark.distributed
def test_what_another_rank_saw_in_abandoned_steps_is_abandoned_too() -> None:
    run = launch(guilty=1, step=6, script=ABANDONED)
    assert run.attempts()["first_step"].to_pylist() == [0, 3]
    assert [f.rule for f in run.findings() if f.rule == "nan_inf"] == []
    (finding,) = [f for f in run.attempt(0).findings() if f.rule == "nan_inf"]
    assert finding.step == 6


@pytest.mark.distributed
def test_a_resumed_job_counts_on_in_every_rank() -> None:
    launch(guilty=7, step=6)
    run = launch(guilty=1, step=2, script=SCRIPT.replace("sonde.watch(model, optimizer)", RESUMED))
    finding = next(f for f in run.findings() if f.rule == "nan_inf")
    assert finding.step == 12
    assert "rank 1" in finding.message


def test_a_rank_finds_only_the_run_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a/b")
    monkeypatch.setenv("MASTER_PORT", "123")
    note = announce(tmp_path, tmp_path, step=7)
    assert "/" not in job_name()
    assert find_announced(tmp_path, since=0.0) == Announced(tmp_path.resolve(), 7)
    monkeypatch.setenv("MASTER_PORT", "124")
    assert find_announced(tmp_path, since=0.0) is None
    note.unlink()
