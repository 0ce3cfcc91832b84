"""The real trackers, offline: what sonde forwards can be read back from them."""

from __future__ import annotations

import json
import sqlite3
import sys

import pytest
import torch

import sonde
from sonde.session.mirror import Mirror

pytestmark = pytest.mark.filterwarnings("default")  # of the trackers' own


def train(tmp_path, mirror, num=12):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.init(project="mirrored", name="m", dir=tmp_path / "runs", config={"lr": 0.01}, verbose=False) as session:
        session.watch(model, optimizer, mirror=mirror)
        for step in range(num):
            loss = model(torch.ones(2, 4)).square().mean() * (float("nan") if step == num - 3 else 1)
            loss.backward()
            session.log({"loss": loss.item()})
            optimizer.step()
            optimizer.zero_grad()
    return sonde.open(session.path)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Some of them import half the world when they begin."""
    monkeypatch.setattr("sonde.session.mirror.CLOSE_S", 90.0)


def norms(run, every=10):
    table = run.stats("grad/weight/norm").to_pandas()
    return {int(s): v for s, v in zip(table.step, table.value, strict=True) if s % every == 0}


@pytest.mark.slow
def test_tensorboard(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGDIR", str(tmp_path / "tb"))
    run = train(tmp_path, "tensorboard")
    folders = [path.parent for path in (tmp_path / "tb").rglob("events.out.*")]
    events = accumulator.EventAccumulator(str(folders[0])).Reload()
    assert {e.step: e.value for e in events.Scalars("grad/weight/norm")} == pytest.approx(norms(run), nan_ok=True)
    assert [e.step for e in events.Scalars("loss")] == list(range(12))
    assert any("findings/" in tag for tag in events.Tags()["tensors"])


@pytest.mark.slow
def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run = train(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("mirrored")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "grad/weight/norm")
    assert {m.step: m.value for m in history} == pytest.approx(norms(run), nan_ok=True)
    assert found.info.status == "FINISHED"
    assert found.data.params["lr"] == "0.01"


@pytest.mark.slow
def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if "trackio" in name]:  # the folder is read when it is imported
        monkeypatch.delitem(sys.modules, name)
    pytest.importorskip("trackio")
    run = train(tmp_path, "trackio")
    (database,) = (path for path in (tmp_path / "trackio").rglob("*.db") if path.stem.startswith("mirrored"))
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics").fetchall()
    connection.close()
    found = {step: json.loads(text).get("grad/weight/norm") for step, text in rows}
    kept = {step: float(value) for step, value in found.items() if value is not None}  # a NaN is kept as a word
    assert kept == pytest.approx(norms(run), nan_ok=True)


@pytest.mark.slow
def test_wandb(tmp_path, offline_wandb):
    open_run = offline_wandb.init(project="theirs", dir=tmp_path)
    try:
        train(tmp_path, Mirror(to="wandb", every=1))
        summary = dict(open_run.summary)
    finally:
        open_run.finish()
    assert summary["sonde/step"] == 11
    assert "sonde/grad/weight/norm" in summary
    assert any(name.startswith("sonde/findings/") for name in summary)
