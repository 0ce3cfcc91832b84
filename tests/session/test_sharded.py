"""Models whose parameters are divided over ranks: what the run shows is true for the whole tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sonde

CHILD = Path(__file__).with_name("child_sharded.py")
RANKS = {"fsdp": 2, "tensor": 2, "hsdp": 4, "both": 4, "mixed": 2}
EXACT = {"n": np.size, "min": np.min, "max": np.max, "zero": lambda x: np.sum(x == 0)}


def launch(ranks: int, script: Path, *arguments: str, expect: int | None = 0) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [*command, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert expect is None or result.returncode == expect, result.stderr[-4000:]
    return result.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("layout", RANKS)
def test_every_statistic_is_that_of_the_whole_tensor(layout: str) -> None:
    dtype = "float32" if layout == "mixed" else "float64"
    launch(RANKS[layout], CHILD, layout, dtype)
    run, truth = sonde.open("latest", dir="runs"), np.load("truth.npz")
    assert run.warnings == []
    wanted = [f"*/*/{stat}" for stat in (*EXACT, "sum", "sumabs", "norm")]
    found = {f"{r['kind']}/{r['site']}/{r['stat']}/{r['step']}": r["value"] for r in run.stats(wanted).to_pylist()}
    names = [name.rsplit("/", 1) for name in truth.files if name != "norms"]
    assert len(names) == 20 * 15 * 5, "every step of every parameter"
    # Reducers add float32 values in float32, a few at a time.
    sum_error, norm_error = (1e-12, 1e-9) if dtype == "float64" else (1e-6, 1e-6)
    for series, step in names:
        values = truth[f"{series}/{step}"].astype(np.float64)
        for stat, of in EXACT.items():
            assert found[f"{series}/{stat}/{step}"] == of(values), (series, stat, step)
        assert abs(found[f"{series}/sum/{step}"] - values.sum()) <= sum_error * np.abs(values).sum(), (series, step)
        assert found[f"{series}/norm/{step}"] == pytest.approx(np.linalg.norm(values), rel=norm_error), (series, step)
    if len(truth["norms"]):
        clipped = run.scalars("*/grad_norm")["value"].to_pylist()
        assert clipped == truth["norms"].tolist(), "exactly what clip_grad_norm_ returned"
        squares = sum(values**2 for _, values in run.lines("grad/*/norm_preclip").values())
        assert np.sqrt(squares) == pytest.approx(truth["norms"], rel=1e-5 if dtype == "float32" else 1e-9)
    if layout == "fsdp":
        single = np.load("single.npz")
        for series, step in names:
            assert found[f"{series}/norm/{step}"] == pytest.approx(np.linalg.norm(single[f"{series}/{step}"]), rel=1e-9)


KILLED = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import sonde

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
session = sonde.watch(model, optimizer, budget=None)
for step in range(8):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
session.flush()
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for step in range(100):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.distributed
def test_a_killed_rank_leaves_what_it_acknowledged() -> None:
    Path("job.py").write_text(KILLED)
    launch(2, Path("job.py"), expect=1)
    run = sonde.open("latest", dir="runs")
    assert run.stats("grad/0.weight/n")["value"].to_pylist() == [128.0] * 8
    ranks = run.ranks().to_pylist()
    assert [(rank["rank"], rank["last_step"]) for rank in ranks] == [(0, 7), (1, 7)]
    assert ranks[1]["status"] == "crashed"
    assert any(text.startswith("rank 1: the process disappeared") for text in run.warnings)
    own = run.stats("grad/0.weight/n", by_rank=True).to_pylist()
    assert [(row["rank"], row["value"]) for row in own if row["step"] == 7] == [(0, 64.0), (1, 64.0)]


@pytest.mark.distributed
def test_ranks_do_not_open_the_catalog_and_a_missing_rank_is_named() -> None:
    Path("job.py").write_text(KILLED.replace("== 1:", "== 7:").replace("range(100)", "range(2)"))
    launch(2, Path("job.py"))
    run = sonde.open("latest", dir="runs")
    folder = run.path / "ranks" / "rank-0001"
    assert sorted(path.name for path in folder.iterdir() if "catalog" in path.name) == ["catalog.jsonl"]
    assert run.catalog.sites.keys() == {id for id in run.catalog.sites if id < 1 << 20}, "no site twice"
    assert run.stats("param/*/n")["value"].to_pylist()[:10] == [128.0] * 10
    (folder / "run.json").unlink()
    alone = sonde.open(run.path)
    assert alone.stats("param/*/n").num_rows == 0, "one shard is never shown as the whole"
    assert "1 of 2 ranks have no folder in this run" in alone.warnings[0]


DRIFTED = KILLED.replace(
    "session.flush()\n", "session.finish()\ndist.destroy_process_group()\nsys.exit()\n"
).replace("nn.Linear(16, 3))\nfully_shard(model)", """nn.Linear(16, 3))
from torch.distributed.device_mesh import init_device_mesh
fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard")))""").replace(
    "    optimizer.step()\n    optimizer.zero_grad()",
    """    optimizer.step()
    optimizer.zero_grad()
    if step == 0 and dist.get_rank() == int(sys.argv[1]):
        model[0].bias._local_tensor[0] += 1.0""",
)  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("guilty", [1, 7])
def test_a_copy_that_drifts_is_named_and_others_are_not(guilty: int) -> None:
    """Two copies under HSDP; no averaging of weights brings them together again."""
    Path("job.py").write_text(DRIFTED)
    launch(2, Path("job.py"), str(guilty))
    run = sonde.open("latest", dir="runs")
    found = [finding for finding in run.findings() if finding.rule == "rank_desync"]
    assert len(found) == (guilty == 1)
    for finding in found:
        assert "weights of rank 1 have differed from those of rank 0 since step 1" in finding.message
    counts = run.stats("param/*/n", steps=3).to_pylist()
    assert {row["site"]: row["value"] for row in counts} == {
        "0.weight": 128, "0.bias": 16, "2.weight": 48, "2.bias": 3,
    }, "copies count once"  # fmt: skip


ELASTIC = KILLED.replace("sonde.watch(model", "sonde.init(resume=True).watch(model").replace(
    "session.flush()\n", "session.finish()\ndist.destroy_process_group()\nsys.exit()\n"
)


@pytest.mark.distributed
def test_a_job_that_resumes_on_fewer_ranks_continues_the_run() -> None:
    Path("job.py").write_text(ELASTIC)
    launch(2, Path("job.py"))
    launch(1, Path("job.py"))
    (run,) = sonde.runs("runs")
    assert run.attempts()["first_step"].to_pylist() == [0, 8]
    assert run.stats("grad/0.weight/n")["value"].to_pylist() == [128.0] * 16
    assert run.warnings == []
