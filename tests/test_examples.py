"""Every example runs as its first lines say, and leaves a run that can be read."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ARGUMENTS = {
    "demo.py": ["--steps", "61", "--fault-step", "40"],
    "quickstart.py": [],
    "custom_loop.py": ["--steps", "10"],
    "decorator.py": ["--steps", "10"],
    "plain_train.py": ["--steps", "10"],
    "small_gpt.py": [],
    "01_simple_mlp.py": [],
    "02_nlp_embedding.py": [],
    "03_rnn_sequence.py": [],
    "04_memory_agent.py": [],
    "05_transformer.py": [],
    "tune_lora.py": ["--samples", "120"],
    "hf_trainer.py": [],
    "lightning_trainer.py": [],
    "keras_fit.py": [],
    "flax_loop.py": [],
    "nan_hunt.py": [],
    "spike_postmortem.py": [],
    "sweep.py": [],
    "extend_adapter.py": [],
    "extend_checkpoints.py": [],
    "extend_method.py": [],
    "extend_mirror.py": [],
    "extend_rule.py": [],
    "extend_store.py": [],
}
# What the first lines of an example promise to show.
SHOWN = {
    "hf_trainer.py": "transformer.ln_f.weight",
    "lightning_trainer.py": "loss",
    "keras_fit.py": "hidden.kernel",
    "flax_loop.py": "hidden.kernel",
    "nan_hunt.py": "Rows of the batch of step 46 that are all zeros: [28]",
    "spike_postmortem.py": "loss_spikes",
    "sweep.py": "lr_too_low",
    "extend_adapter.py": "finished after 20 steps, 20 losses",
    "extend_checkpoints.py": "Kept steps [15, 20]; restored step 15.",
    "extend_method.py": "The loss went from",
    "extend_mirror.py": "has 20 losses",
    "extend_rule.py": "reward_plateau: The reward has not exceeded",
    "extend_store.py": "snapshots of steps [0, 5, 10]",
}
# They record no model: one only numbers, the other nothing.
WITHOUT_GRADIENTS = ["extend_rule.py", "extend_checkpoints.py"]
DISTRIBUTED = ["ddp.py", "fsdp2.py", "tensor_parallel.py", "pipeline.py"]
# What a tutorial must say it found, and that it was gone afterwards.
TUTORIALS = {
    "01_simple_mlp.py": "SATURATED",
    "02_nlp_embedding.py": "DEAD",
    "03_rnn_sequence.py": "VANISHING_TEMPORAL",
    "04_memory_agent.py": "BOTTLENECK",
    "05_transformer.py": "RESIDUAL_DECAY",
}
COMMAND = "from sonde.cli.main import main; main()"
pytestmark = pytest.mark.slow


def run_python(folder: Path, *arguments: str) -> str:
    """Run Python in an empty folder and give back what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SONDE_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_example_is_left_out_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*ARGUMENTS, *DISTRIBUTED}


def read_the_run(folder: Path) -> None:
    import sonde

    (run,) = sonde.runs(folder / "runs")
    assert run.status == "finished"
    assert run.stats("grad/*/norm").num_rows > 0
    assert run.warnings == []


@pytest.mark.parametrize("name", sorted(TUTORIALS))
def test_tutorial_finds_a_problem_and_mends_it(name: str, tmp_path: Path) -> None:
    out = run_python(tmp_path, "-W", "error::UserWarning", str(EXAMPLES / name))
    before, _, after = out.partition(TUTORIALS[name])
    assert "===" in before
    assert "No issue" in after
    assert "=== Before and after" in after


@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - set(TUTORIALS) - {"demo.py"}))
def test_example_runs(name: str, tmp_path: Path) -> None:
    out = run_python(tmp_path, "-W", "error::UserWarning", str(EXAMPLES / name), *ARGUMENTS[name])
    assert SHOWN.get(name, "") in out
    if name not in ("plain_train.py", "small_gpt.py", "sweep.py", "keras_fit.py", *WITHOUT_GRADIENTS):
        read_the_run(tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_example_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_python(tmp_path, *launcher, str(EXAMPLES / name), "--steps", "10")
    read_the_run(tmp_path)
    import sonde

    (run,) = sonde.runs(tmp_path / "runs")
    assert run.ranks().num_rows == (1 if name == "ddp.py" else 2)
    sizes = {row["site"]: math.prod(row["shape"]) for row in run.sites("grad/*").to_pylist()}
    counts = run.stats("grad/*/n", steps=0).to_pylist()
    assert {row["site"]: row["value"] for row in counts} == sizes, "every tensor is whole, and counts once"
    assert run.scalars("loss").num_rows == 10


def test_an_unmodified_script_is_watched_by_the_command(tmp_path: Path) -> None:
    out = run_python(tmp_path, "-c", COMMAND, "run", str(EXAMPLES / "plain_train.py"), "--steps", "100")
    assert "step 100: loss" in out
    import sonde

    (run,) = sonde.runs(tmp_path / "runs")
    assert run.stats("grad/0.weight/norm").num_rows == 100


def test_the_demo_names_the_layer_and_the_step_that_were_planted(tmp_path: Path) -> None:
    out = run_python(tmp_path, str(EXAMPLES / "demo.py"), *ARGUMENTS["demo.py"])
    assert "blocks.2.mlp.1 (TemperedGELU) produced NaN from finite inputs" in " ".join(out.split())
    assert "From step 40 on, blocks.2.mlp.1 divided by a temperature of zero." in out
    assert "\x1b" not in out
    read_the_run(tmp_path)


def test_the_demo_serves_the_dashboard_on_a_terminal_until_interrupted(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SONDE_")}
    command = [sys.executable, str(EXAMPLES / "demo.py"), *ARGUMENTS["demo.py"]]
    demo = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1", "BROWSER": "true"},
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    try:
        out, end = "", time.monotonic() + 280
        while not (url := re.search(r"http://\S+", out)) and time.monotonic() < end:
            if select.select([parent], [], [], 1.0)[0]:
                out += os.read(parent, 4096).decode(errors="replace")
        assert url, out
        with urllib.request.urlopen(url.group()) as answer:
            assert b"sonde" in answer.read()
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(30) == 0
    finally:
        demo.kill()
        os.close(parent)


def test_the_benchmark_writes_its_table_and_its_numbers(tmp_path: Path) -> None:
    arguments = [
        "--quick",
        "--rounds",
        "1",
        "--block-steps",
        "2",
        "--models",
        "mlp",
        "--out",
        str(tmp_path / "results"),
    ]
    run_python(tmp_path, str(ROOT / "benchmarks" / "overhead.py"), *arguments)
    report = json.loads((tmp_path / "results" / "overhead.json").read_text())
    assert {"command", "commit", "date", "machine", "versions", "rounds"} <= set(report)
    arms = report["models"]["mlp"]["arms"]
    assert {"base", "base again", "sonde w+g+u", "sonde w+g+u+a", "sonde default", "wandb.watch"} <= set(arms)
    for arm in arms.values():
        assert arm["cpu_interval"][0] <= arm["cpu_ratio"] <= arm["cpu_interval"][1]
    assert arms["base"]["cpu_ratio"] == 1.0
    for name in ("base again", "sonde w+g+u", "sonde w+g+u+a", "wandb.watch", "naive loop", "TensorBoard"):
        assert arms[name]["parameters_identical_to_base"] is True
    assert arms["sonde w+g+u"]["rows_per_step"] == 6 * 3  # six tensors: their weights, gradients and updates
    assert arms["sonde w+g+u"]["bytes_per_row_without_hist"] <= arms["sonde w+g+u"]["bytes_per_row"]
    table = (tmp_path / "results" / "overhead.md").read_text()
    assert all(f"{name}" in table for name in arms)


def test_notebook_shows_the_run_its_finding_and_a_link(tmp_path: Path) -> None:
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [str(cell.get("outputs", "")) for cell in book.cells]
    assert "dead_relu" in shown[3]
    assert "Open the dashboard" in shown[-1]
