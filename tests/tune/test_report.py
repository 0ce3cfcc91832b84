"""The standard report of runs and checkpoints that were made without transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sonde
from sonde.errors import RunNotFoundError, UsageError
from sonde.read.run.link import linked_run
from sonde.show.analyses.convergence import convergence
from sonde.show.analyses.gradient_flow import gradient_flow
from sonde.show.report.page import line_chart
from sonde.tune import CheckpointAnalyzer, CheckpointManager, LiveAnalyzer
from sonde.write.checkpoints import write_link


def record(dir: Path, losses: list[float], held_out: list[float] = []) -> Path:  # noqa: B006
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sonde.init(project="p", name="<b>n", dir=dir) as session:
        session.watch(net, optimizer)
        manager = CheckpointManager(session, model=net, interval=8)
        for step, loss in enumerate(losses):
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            session.log({"loss": loss, **({"eval_loss": held_out[step]} if step < len(held_out) else {})})
            manager.step(step + 1)
    return session.path


NOISE = np.random.default_rng(3).normal(size=60)
FALLING = list(3 * np.exp(-np.arange(24) / 5))


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        (
            list(3 * np.exp(-np.arange(60) / 4)),
            "loss fell from 3 to 2.219e-06, 90 % of it by step 10. It has converged",
        ),
        (list(3 - 0.1 * np.arange(24)), "loss fell from 3 to 0.9 and was still falling"),
        ([3.0] * 24, "loss did not improve"),
        (
            [3 - 0.2 * s for s in range(12)] + [1 + 0.1 * s for s in range(12)],
            "loss was best at step 10 (1) and has risen to 1.9",
        ),
        ([3.0] * 16 + [float("nan")] * 8, "loss diverged: it ends as NaN or Inf, first at step 16"),
        ([3.0, 2.0], "loss has 2 finite values; judging it needs at least 10"),
        ([3.0, *np.geomspace(150, 31, 40)], "loss diverged: it rose from 3 to 33.6"),
        (list(3 + 0.06 * NOISE - 0.001 * np.arange(60)), "loss did not improve: it went from 3.122 to 2.945"),
        # Noise alone rises in the last third: it has not turned.
        (
            list(1.2 + 1.4 * np.exp(-np.arange(60) / 6) + 0.06 * np.abs(NOISE)),
            "loss fell from 2.722 to 1.236, 90 % of it by step 15. It has converged",
        ),
    ],
)
def test_convergence(tmp_path, losses, verdict):
    run = sonde.open(record(tmp_path, losses))
    assert convergence(run.window(())).verdict.startswith(verdict)
    assert CheckpointAnalyzer(run.path).generate_standard_report().convergence.verdict.startswith(verdict)


def test_every_section_has_its_numbers(tmp_path):
    run = record(tmp_path, FALLING, [3.0 - 0.05 * s for s in range(24)])
    report = CheckpointAnalyzer(run).generate_standard_report()
    assert report.gradient_flow.verdict == gradient_flow(sonde.open(run)).verdict  # the answer of `sonde report`
    assert [row["site"] for row in report.gradient_flow.rows] == ["weight", "bias"]
    assert [row["step"] for row in report.weight_evolution.rows] == [8, 16, 24]
    assert report.weight_evolution.rows[0]["from the first"] == 0
    assert report.weight_evolution.rows[-1]["from the first"] > 0
    assert report.overfitting.facts["checkpoint nearest to it"] == 24
    assert report.adapters is None
    for title in ("Training convergence", "Gradient flow", "Weight evolution", "Overfitting"):
        assert title in report.text


def test_rising_held_out_loss_is_reported_with_the_checkpoint_to_take(tmp_path):
    run = record(tmp_path, FALLING, [2 - 0.1 * s if s < 9 else 1.3 + 0.01 * s for s in range(24)])
    section = CheckpointAnalyzer(run).generate_standard_report().overfitting
    assert "best at step 8" in section.verdict
    assert section.facts["checkpoint nearest to it"] == 8


def test_saved_as_html_json_and_text(tmp_path):
    analyzer = CheckpointAnalyzer(record(tmp_path, FALLING))
    report = analyzer.generate_standard_report(save_to="out/report.html")
    page = Path("out/report.html").read_text()
    assert "p/&lt;b&gt;n" in page
    assert "<b>n" not in page
    assert json.loads(report.save("report.json").read_text())["name"] == "p/<b>n"
    assert report.save("report.txt").read_text() == str(report)
    with pytest.raises(UsageError, match=r"Use one of .html, .json, .txt"):
        report.save("report.pdf")


def test_curves_and_bars_are_drawn(tmp_path):
    held_out = [3.0 - 0.05 * s for s in range(23)] + [float("nan")]
    page = CheckpointAnalyzer(record(tmp_path, FALLING, held_out)).generate_standard_report().html
    assert page.count("<svg") == 3  # losses twice, weights once
    assert 'aria-label="loss, eval_loss, steps 0 to 23' in page
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", page))
    assert page.count('class="bar"') == 2


def test_lines_have_gaps_where_there_is_no_number():
    assert line_chart({"flat": ([1, 2], [3.0, 3.0])}).count("<polyline") == 1
    assert line_chart({"a gap": ([1, 2, 3], [1.0, float("nan"), 2.0])}).count("<polyline") == 2
    assert line_chart({"one": ([1], [1.0])}) == ""


def test_checkpoints_without_a_run(tmp_path):
    net = nn.Linear(2, 2)
    manager = CheckpointManager(tmp_path / "kept", model=net, interval=1)
    for step in (1, 2):
        net.weight.data.fill_(step)
        manager.step(step)
    report = CheckpointAnalyzer(tmp_path / "kept").generate_standard_report()
    assert report.convergence.verdict == "Not recorded."
    assert [row["step"] for row in report.weight_evolution.rows] == [1, 2]
    with pytest.raises(RunNotFoundError, match="refers to no run"):
        CheckpointAnalyzer(tmp_path / "kept").export_raw_gradients()


def test_checkpoints_of_transformers_are_compared_too(tmp_path):
    for step in (5, 10):
        path = tmp_path / "hf" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        save_file({"w": torch.full((3,), float(step), dtype=torch.bfloat16)}, path / "model.safetensors")
    rows = CheckpointAnalyzer(tmp_path / "hf").generate_standard_report().weight_evolution.rows
    assert [(row["step"], row["from the first"]) for row in rows] == [(5, 0.0), (10, pytest.approx(1.0))]


def test_gradients_are_exported_as_statistics_where_no_snapshots_are(tmp_path):
    analyzer = CheckpointAnalyzer(record(tmp_path, FALLING))
    found = analyzer.export_raw_gradients("gradients.parquet")
    steps, columns = found["weight"]
    assert (found.is_whole, len(found), steps.tolist()) == (False, 2, list(range(24)))
    assert columns["norm"].shape == (24,)
    assert Path("gradients.parquet").stat().st_size > 0
    with pytest.raises(UsageError, match="only statistics were recorded"):
        analyzer.export_raw_gradients("gradients.npz")


def test_a_folder_names_its_run(tmp_path):
    run = record(tmp_path / "runs", [1.0])
    write_link(tmp_path / "out", run)
    assert linked_run(tmp_path / "out") == run
    assert linked_run(run / "checkpoints") == run
    (tmp_path / "moved").mkdir()
    for name in ("runs", "out"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert linked_run(tmp_path / "moved" / "out") == tmp_path / "moved" / run.relative_to(tmp_path)
    (tmp_path / "moved" / "out" / "sonde.json").write_text("[]")
    assert linked_run(tmp_path / "moved" / "out") is None


def test_monitoring_waits_for_a_run(tmp_path):
    with pytest.raises(RunNotFoundError, match="no run started"):
        LiveAnalyzer(checkpoint_dir=tmp_path).start_monitoring(wait_s=0.3)


@pytest.mark.slow
def test_monitoring_without_a_terminal_shows_one_frame(tmp_path, capfd):
    process = LiveAnalyzer(record(tmp_path / "runs", FALLING)).start_monitoring()
    assert process.returncode == 0
    assert "loss" in capfd.readouterr().out


@pytest.mark.slow
def test_the_analyzer_needs_no_torch(tmp_path):
    run = record(tmp_path, FALLING)
    code = f"""
import sys
from sonde.cli.main import main
try:
    main(["analyze", {str(run)!r}, "--json"])
except SystemExit as exit:
    assert not exit.code
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "p/<b>n"
