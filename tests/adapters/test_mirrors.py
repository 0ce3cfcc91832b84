"""The real trackers, offline: what sonde forwards can be read back from them."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys

import pytest
import torch

import sonde
from sonde.session.mirror import Mirror
from sonde.testing.adapters import check_hint

pytestmark = pytest.mark.filterwarnings("default")  # of the trackers' own


def train(tmp_path, mirror, num=12, each_step=lambda step: None):
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
            each_step(step)
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


def records(content, block=32768, head=7):
    """Of LevelDB's log, which W&B writes: (checksum, length, type) and bytes, in blocks; long ones are in parts."""
    place, parts = head, b""
    while place + head <= len(content):
        if block - place % block < head:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + head])
        parts += content[place + head : place + head + length]
        place += head + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def rows_of(path):
    """The history in a file of W&B's, row by row."""
    from wandb.proto.wandb_internal_pb2 import Record

    for record in map(Record.FromString, records(path.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


@pytest.mark.slow
def test_wandb(tmp_path, offline_wandb):
    """Beside a run of the user's, who counts steps by hand: all of theirs is kept, and `wandb.run` is theirs."""
    theirs = offline_wandb.init(project="theirs", dir=tmp_path)
    try:
        run = train(tmp_path, Mirror(to="wandb", every=1), each_step=lambda step: theirs.log({"mine": step}, step=step))
        assert offline_wandb.run is theirs
    finally:
        theirs.finish()
        offline_wandb.teardown()  # its process writes when it likes, and all of it when it ends
    files = {path.stem.removeprefix("run-") == theirs.id: path for path in tmp_path.rglob("*.wandb")}
    assert [row["mine"] for row in rows_of(files[True])] == list(range(12))
    found = {
        r["sonde/step"]: r["sonde/grad/weight/norm"] for r in rows_of(files[False]) if "sonde/grad/weight/norm" in r
    }
    assert {step: float(value) for step, value in found.items()} == pytest.approx(norms(run, 1), nan_ok=True)


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(name, monkeypatch):
    check_hint(f"sonde.adapters.{name}", name, monkeypatch)
