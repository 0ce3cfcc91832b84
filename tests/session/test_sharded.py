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
