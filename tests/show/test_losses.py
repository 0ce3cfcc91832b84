"""One training loss: whatever was logged, every view, rule and report picks the same series of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sonde
from sonde.diagnose.measures.progress import loss_name, validation_name
from sonde.diagnose.rolling import Rolling
from sonde.schema.losses import SEEN
from sonde.schema.records import ScalarsRecord
from sonde.show.analyses.convergence import convergence
from sonde.show.analyses.overfitting import overfitting
from sonde.show.monitor.reading import Reading
from sonde.show.summary import describe, scalar_series
from sonde.show.web.answers.overview import headline
from sonde.tune import CheckpointAnalyzer
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions

STEPS = 12
NAMES = [
    *(
        "loss",
        "train_loss",
        "train/loss",
        "Loss/Train",
        "loss/train",
        "total_loss",
        "objective/loss",
        "train_loss_epoch",
    ),
    *("val_loss", "val/loss", "eval_loss", "Loss.Val", "test_loss", "eval_retained_loss", "val/box_loss", "box_loss"),
    *("mse_loss", "kl_loss", "loss_scale", "optim/loss_scale", "model/gpt/loss", "lr", "a[0]_loss", "train_runtime"),
    *("data/loss/baseline", "accuracy", "val_acc", "loss 1", *SEEN),
]


def write(folder: Path, names: list[str]) -> tuple[Path, list[ScalarsRecord], dict[int, str]]:
    path = create_run(folder, project="p", name="n")
    writer = Writer(path, WriterOptions(heartbeat_s=5.0, system_interval_s=0.0))
    ids = np.array([writer.scalar_id(name) for name in names], np.int32)
    records = []
    for step in range(STEPS):
        values = np.arange(len(names)) + 10.0 + 1 / (1 + step)
        records.append(ScalarsRecord(ids, np.full(len(ids), step), np.full(len(ids), time.time()), values))
        writer.put(records[-1], 100, step=step)
    writer.close("finished")
    return path, records, dict(zip(ids.tolist(), names, strict=True))


def picked(path: Path, records: list[ScalarsRecord], names: dict[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The training loss and the validation loss, by every view."""
    run = sonde.open(path)
    window = run.window(())
    rolling = Rolling(())
    rolling.scalar_names = names
    rolling.add(records)
    live = rolling.window({})
    watched = Reading(run)
    watched.look()
    shown = [series.name for series in scalar_series(run)]
    analyzer = CheckpointAnalyzer(path).generate_standard_report()
    analyzed = analyzer.convergence.curves, analyzer.overfitting.curves
    first = headline(dict(enumerate(run.scalar_names)))
    drawn = {key: None if i is None else run.scalar_names[i] for key, i in first.items()}
    training = {
        "rules": loss_name(window),
        "live rules": loss_name(live),
        "list": (describe(run)["loss"] or {}).get("name"),
        "ui": drawn["loss"],
        "monitor": watched.frame().loss,
        "report": _first_line(convergence(window)),
        "analyze": next(iter(analyzed[0]), None),
        "show": next((name for name in shown if name == loss_name(window)), None),
    }
    validation = {
        "rules": validation_name(window),
        "live rules": validation_name(live),
        "ui": drawn["val_loss"],
        "report": _last_line(overfitting(window)),
        "analyze": next(reversed(analyzed[1]), None),
        "show": next((name for name in shown if name == validation_name(window)), None),
    }
    return training, validation


def _first_line(analysis: Any) -> str | None:
    return analysis.charts[0].lines[0].name if analysis.charts else None


def _last_line(analysis: Any) -> str | None:
    return analysis.charts[0].lines[-1].name if analysis.charts else None


@given(names=st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=8))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_view_picks_the_same_losses(tmp_path: Path, names: list[str]) -> None:
    for found in picked(*write(tmp_path / "runs", names)):
        assert len(set(found.values())) == 1, found


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["loss/train", "data/loss/value"], "loss/train"),
        (["total_loss"], "total_loss"),
        (["objective/loss", "loss"], "loss"),
        (["accuracy", "lr"], None),
        (["data/loss/train", "optim/lr"], "data/loss/train"),
    ],
)
def test_names_that_views_used_to_disagree_on(tmp_path: Path, names: list[str], expected: str | None) -> None:
    training, _ = picked(*write(tmp_path / "runs", names))
    assert set(training.values()) == {expected}, training
