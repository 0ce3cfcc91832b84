"""The real trackers: what a training script forwards is read back from them, and equals what the run holds."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sonde
from sonde.session.observers.mirror import Mirror
from sonde.testing.adapters import check_hint

pytestmark = pytest.mark.filterwarnings("default")  # of the trackers' own

SCRIPT = Path(__file__).with_name("mirror_script.py")
Values = dict[tuple[str, int], float]


def run_script(folder: Path, name: str, ending: str = "finish") -> tuple[Any, str]:
    """The run that the script made, and what it printed on stderr."""
    environment = {**os.environ, "HOME": str(folder), "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name, ending], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == (1 if ending == "fail" else 0), done.stderr
    return sonde.open("latest", dir=folder / "runs"), done.stderr


def expected(run: Any) -> Values:
    """Everything the script's mirror is to be sent."""
    stats = run.stats(["grad/*/norm", "update/*/ratio"]).to_pandas()
    found = {(f"{r.kind}/{r.site}/{r.stat}", r.step): r.value for r in stats.itertuples() if r.step % 5 == 0}
    logged = [run.scalars(name).to_pandas() for name in ("loss", "large", "optim/*")]
    return found | {(r["name"], r["step"]): r["value"] for table in logged for _, r in table.iterrows()}


class TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        (events,) = {path.parent for path in (folder / "tensorboard").rglob("events.out.*")}
        self._events = accumulator.EventAccumulator(str(events), size_guidance={"scalars": 0, "tensors": 0}).Reload()

    def values(self) -> Values:
        tags = self._events.Tags()["scalars"]
        return {(tag, event.step): event.value for tag in tags for event in self._events.Scalars(tag)}

    def exact(self, value: float) -> float:
        """TensorBoard's scalars are float32."""
        with np.errstate(over="ignore"):
            return float(np.float32(value))

    def config(self) -> dict[str, Any]:
        text = self._events.Tensors("config")[0].tensor_proto.string_val[0].decode()
        return json.loads(text.removeprefix("```json").removesuffix("```"))

    def findings(self) -> dict[str, str]:
        found = {}
        for tag in self._events.Tags()["tensors"]:
            if tag.startswith("findings/"):
                (text,) = (event.tensor_proto.string_val[0].decode() for event in self._events.Tensors(tag))
                found[tag.split("/")[1]] = text.split("**")[1]
        return found


class MLflow:
    name = "mlflow"

    def __init__(self, folder: Path) -> None:
        mlflow = pytest.importorskip("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        experiment = self._client.get_experiment_by_name("mirrored")
        (self.run,) = self._client.search_runs([experiment.experiment_id])

    def values(self) -> Values:
        id, found = self.run.info.run_id, self.run.data.metrics
        rows = [metric for name in found for metric in self._client.get_metric_history(id, name)]
        values = {(row.key, row.step): row.value for row in rows}
        assert len(values) == len(rows)
        return values

    def exact(self, value: float) -> float:
        """MLflow's databases keep the largest number for an infinite one."""
        return math.copysign(sys.float_info.max, value) if math.isinf(value) else value

    def config(self) -> dict[str, Any]:
        params = self.run.data.params
        return {"lr": float(params["lr"]), "net": {"width": int(params["net/width"])}}

    def findings(self) -> dict[str, str]:
        tags = self.run.data.tags
        return {k.rpartition(".")[2]: v.split()[0] for k, v in tags.items() if k.startswith("sonde.finding.")}


class Trackio:
    name = "trackio"

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("trackio")
        (self._file,) = (path for path in folder.rglob("trackio/*.db") if path.stem.startswith("mirrored"))

    def _rows(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self._file)) as connection:
            return connection.execute(query).fetchall()

    def values(self) -> Values:
        found: Values = {}
        for step, text in self._rows("select step, metrics from metrics"):
            for name, value in json.loads(text).items():
                assert (name, step) not in found
                found[name, step] = float(value)  # a NaN is kept as a word
        return found

    def exact(self, value: float) -> float:
        return value

    def config(self) -> dict[str, Any]:
        ((text,),) = self._rows("select config from configs")
        return {key: value for key, value in json.loads(text).items() if not key.startswith("_")}

    def findings(self) -> dict[str, str]:
        words = {"error": "critical", "warn": "warning", "info": "info"}
        rows = self._rows("select title, level, text from alerts")
        assert len({title for title, *_ in rows}) == len(rows), "an alert was sent twice"
        assert all(re.match(ALERT, text) for *_, text in rows)
        return {title.removeprefix("sonde: "): words[level] for title, level, _ in rows}


class WandB:
    name = "wandb"

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("wandb")
        self._records = [record for path in sorted(folder.rglob("*.wandb")) for record in records_of(path)]

    def values(self) -> Values:
        found: Values = {}
        for row in rows_of(self._records):
            step = row.pop("sonde/step")
            for name, value in row.items():
                if not name.startswith("_"):
                    assert (name.removeprefix("sonde/"), step) not in found
                    found[name.removeprefix("sonde/"), step] = float(value)
        return found

    def exact(self, value: float) -> float:
        return value

    def config(self) -> dict[str, Any]:
        runs = [record.run for record in self._records if record.WhichOneof("record_type") == "run"]
        return {item.key: json.loads(item.value_json) for item in runs[0].config.update if not item.key.startswith("_")}

    def findings(self) -> dict[str, str]:
        words = {"ERROR": "critical", "WARN": "warning", "INFO": "info"}
        alerts = [record.alert for record in self._records if record.WhichOneof("record_type") == "alert"]
        assert len({alert.title for alert in alerts}) == len(alerts), "an alert was sent twice"
        assert all(re.match(ALERT, alert.text) for alert in alerts)
        return {alert.title.removeprefix("sonde: "): words[alert.level] for alert in alerts}


# A step, a sentence that says what is wrong, and one that says what to do.
ALERT = r"Since step \d+: .+\. [A-Z].+\.$"
TRACKERS = [TensorBoard, MLflow, Trackio, WandB]


def check_values(found: Any, run: Any) -> None:
    wanted = {key: found.exact(value) for key, value in expected(run).items()}
    assert found.values() == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
    assert {name for name, _ in wanted} >= {"loss", "large", "optim/lr", "grad/weight/norm", "update/weight/ratio"}


def delivered(run: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run.path / "run.json").read_text())["facts"]["mirrors"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_has_what_the_run_has(tracker, tmp_path):
    """Values at their steps, the configuration and the findings with their severities; and again when it is resumed."""
    run, said = run_script(tmp_path, tracker.name)
    found, num = tracker(tmp_path), len(expected(run))
    check_values(found, run)
    assert delivered(run) == [{"to": tracker.name, "delivered": num, "of": num}]
    assert "the mirror" not in said
    assert found.config() == {"lr": 0.01, "net": {"width": 4}}
    rows = run.sql("select anomaly_type, severity from anomalies").to_pylist()
    assert found.findings() == {row["anomaly_type"]: row["severity"] for row in rows}
    assert "critical" in found.findings().values()
    run, _ = run_script(tmp_path, tracker.name, "resume")
    assert len(sonde.runs(dir=tmp_path / "runs")) == 1
    assert {step for _, step in expected(run)} == set(range(24))
    check_values(tracker(tmp_path), run)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_script_that_never_calls_finish_delivers_everything(tracker, tmp_path):
    run, said = run_script(tmp_path, tracker.name, "no-finish")
    check_values(tracker(tmp_path), run)
    assert "the mirror" not in said


@pytest.mark.slow
def test_the_end_of_a_training_that_fails_is_known_to_mlflow(tmp_path):
    run, _ = run_script(tmp_path, "mlflow", "fail")
    assert run.status == "crashed"
    assert MLflow(tmp_path).run.info.status == "FAILED"


def train(tmp_path, mirror, num=12, each_step=lambda step: None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sonde.init(project="mirrored", name="m", dir=tmp_path / "runs", config={"lr": 0.01}, verbose=False) as session:
        session.watch(model, optimizer, mirror=mirror)
        for step in range(num):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            session.log({"loss": loss.item()})
            optimizer.step()
            optimizer.zero_grad()
            each_step(step)
    return sonde.open(session.path)


@pytest.mark.slow
def test_a_run_of_mlflow_that_is_open_keeps_its_own_metrics(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/theirs.db")
    try:
        with mlflow.start_run() as theirs:
            mlflow.log_params({"lr": 3})
            run = train(tmp_path, "mlflow", each_step=lambda step: mlflow.log_metric("loss", -1.0, step=step))
        client = mlflow.MlflowClient()
        history = client.get_metric_history(theirs.info.run_id, "loss")
        mirrored = client.get_metric_history(theirs.info.run_id, "sonde/loss")
        params = client.get_run(theirs.info.run_id).data.params
    finally:
        mlflow.set_tracking_uri(None)
    assert [metric.value for metric in history] == [-1.0] * 12
    assert [metric.value for metric in mirrored] == run.scalars("loss")["value"].to_pylist()
    assert params == {"lr": "3", "sonde/lr": "0.01"}


@pytest.mark.slow
def test_a_store_that_mlflow_cannot_open_is_one_warning(tmp_path, monkeypatch, capfd):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri("nosuchstore://nowhere")
    try:
        run = train(tmp_path, "mlflow")
    finally:
        mlflow.set_tracking_uri(None)
    said = capfd.readouterr().err
    assert said.count('the mirror "mlflow"') == 1
    assert "did not start" in said
    num = delivered(run)[0]["of"]
    assert delivered(run) == [{"to": "mlflow", "delivered": 0, "of": num}]
    messages = run.sql("select message from events where type = 'mirror'")["message"].to_pylist()
    assert f"0 of {num} values delivered" in messages[-1]
    assert num > 12
    assert (run.status, run.scalars("loss").num_rows) == ("finished", 12)


def records(content: bytes, block: int = 32768, head: int = 7) -> Iterator[bytes]:
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


def records_of(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    yield from map(Record.FromString, records(path.read_bytes()))


def rows_of(found: Any) -> Iterator[dict[str, Any]]:
    """The history in a file of W&B's, row by row."""
    for record in found:
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


@pytest.mark.slow
def test_wandb(tmp_path, offline_wandb):
    """Next to a run of the user's, who counts steps by hand: all of theirs is kept, and `wandb.run` is theirs."""
    theirs = offline_wandb.init(project="theirs", dir=tmp_path)
    try:
        run = train(tmp_path, Mirror(to="wandb", every=1), each_step=lambda step: theirs.log({"mine": step}, step=step))
        assert offline_wandb.run is theirs
    finally:
        theirs.finish()
        offline_wandb.teardown()  # its process writes when it likes, and all of it when it ends
    files = {path.stem.removeprefix("run-") == theirs.id: path for path in tmp_path.rglob("*.wandb")}
    assert [row["mine"] for row in rows_of(records_of(files[True]))] == list(range(12))
    rows = [row for row in rows_of(records_of(files[False])) if "sonde/grad/weight/norm" in row]
    norms = run.stats("grad/weight/norm").to_pandas()
    found = {row["sonde/step"]: float(row["sonde/grad/weight/norm"]) for row in rows}
    assert found == dict(zip(norms.step, norms.value, strict=True))


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(name, monkeypatch):
    check_hint(f"sonde.adapters.{name}", name, monkeypatch)


def test_a_missing_package_is_a_warning_and_training_continues(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.delitem(sys.modules, "sonde.adapters.trackio", raising=False)
    run = train(tmp_path, "trackio")
    assert "pip install 'sonde-ml[trackio]'" in capfd.readouterr().err
    assert run.scalars("loss").num_rows == 12
