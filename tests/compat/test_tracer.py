"""LayerClaw's workflow runs with only the import changed, and every name it documents exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.compat import tracer
from sonde.errors import SessionError, UsageError

NAMES = """
init log step watch finish TracerConfig GlobalState TrainingTracer GradientHook HookManager SystemMetrics StorageBackend
QueryEngine AnomalyDetector
"""
# The calls are those of the documentation, in the order of its data flow.
TRAINING = """
import tracer

tracer.init(project="my-project", checkpoint_interval=100)
tracer.watch(model)
for step in range(30):
    loss = model(batch).square().mean() * (float("nan") if step >= spoilt else 1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tracer.log({"loss": loss.item()})
    tracer.step()
run_id = tracer.get_run_id()
tracer.finish()
"""


@pytest.fixture(autouse=True)
def no_run_left() -> Any:
    yield
    if tracer.GlobalState().is_initialized():
        tracer.finish()


def trained(run_snippet: Any, spoilt: int = 30) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batch": torch.randn(8, 4)}
    return run_snippet(TRAINING, "tracer", {**given, "spoilt": spoilt})["run_id"]


def test_every_documented_name_exists() -> None:
    assert set(NAMES.split()) <= set(tracer.__all__)
    assert [name for name in tracer.__all__ if not hasattr(tracer, name)] == []


def test_a_training_is_recorded_and_queried(run_snippet: Any) -> None:
    id = trained(run_snippet)
    run = sonde.open(id)
    assert (run.project, run.status, run.last_step) == ("my-project", "finished", 29)
    assert run.config["checkpoint_interval"] == 100
    assert len(run.stats("grad/0.weight/norm")) == 30
    storage = tracer.StorageBackend()
    assert [row["run_id"] for row in storage.list_runs("my-project")] == [id]
    assert storage.get_run(id)["total_steps"] == 30
    assert storage.get_run("nothing") is None
    assert len(storage.get_checkpoints(id)) == 30
    assert {row["layer_name"] for row in storage.get_gradient_stats(id)} >= {"0.weight", "2.bias"}
    assert storage.get_metric_timeseries(id, "loss")["steps"] == list(range(30))
    summary = tracer.QueryEngine().get_run_summary(id)
    assert summary["final_metrics"]["loss"] == run.scalars("loss")["value"].to_pylist()[-1]


def test_anomalies_and_the_step_of_divergence(run_snippet: Any) -> None:
    good, bad = trained(run_snippet), trained(run_snippet, spoilt=20)
    (found,) = tracer.AnomalyDetector().detect_nan_inf(bad)
    assert (found["anomaly_type"], found["step"]) == ("nan_inf", 20)
    assert found["details"]["remedy"]
    detector = tracer.AnomalyDetector(tracer.StorageBackend())
    assert found in detector.detect_all_anomalies(bad)
    assert detector.detect_nan_inf(good) == detector.detect_memory_spikes(good) == []
    query = tracer.QueryEngine()
    assert query.find_divergence(good, good) is None
    assert query.find_divergence(good, bad) == 20
    compared = query.compare_runs(good, bad, metrics=["loss"])
    assert compared["divergence_point"] == 20
    assert compared["metrics"]["loss"]["run1"] < 1
    tracer.StorageBackend().delete_run(bad)
    assert tracer.StorageBackend().get_run(bad) is None


def test_configuration_is_checked_and_reaches_the_run(tmp_path: Path) -> None:
    config = tracer.TracerConfig(
        "mine", "first", tags=["a"], notes="why", storage_path=str(tmp_path / "here"), gradient_layers=["0."],
        track_system_metrics=False, custom_metrics={"lr": 0.1},
    )  # fmt: skip
    recording = tracer.TrainingTracer(config)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    recording.watch(model)
    model(torch.randn(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    recording.step()
    recording.finish()
    run = sonde.open("mine/first", dir=tmp_path / "here")
    assert (run.tags, run.notes, run.config["custom_metrics"]) == (("a",), "why", {"lr": 0.1})
    assert set(run.stats("grad/*/norm")["site"].to_pylist()) == {"0.weight", "0.bias"}
    assert len(run.system()) == 0
    with pytest.raises(UsageError, match="checkpoint_interval= must be at least 1"):
        tracer.TracerConfig("mine", checkpoint_interval=0)


def test_one_tracer_per_process() -> None:
    with pytest.raises(SessionError, match=r"Call tracer.init"):
        tracer.log({"loss": 1.0})
    started = tracer.init(project="p", run_name="n")
    assert tracer.GlobalState() is tracer.GlobalState()
    assert tracer.GlobalState().tracer is started
    with pytest.raises(SessionError, match=r"Call tracer.finish"):
        tracer.init(project="p")
    tracer.step()
    assert tracer.get_step() == 1
    tracer.finish()
    assert not tracer.GlobalState().is_initialized()


def test_gradient_statistics_are_those_of_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    hooks = tracer.HookManager(tracer.TracerConfig("p", gradient_layers=["0."]))
    hooks.attach_all(model)
    model(torch.randn(5, 4)).sum().backward()
    found = hooks.get_all_data()["GradientHook"]
    assert set(found) == {"0.weight", "0.bias"}
    grad = model[0].weight.grad
    expected = {"norm": grad.norm(), "mean": grad.mean(), "std": grad.std(unbiased=False), "max": grad.max()}
    for name, value in expected.items():
        assert found["0.weight"][name] == pytest.approx(value.item(), rel=1e-5), name
    assert found["0.weight"]["num_zeros"] == found["0.weight"]["num_nans"] == 0
    hooks.reset_all()
    hooks.detach_all()
    model(torch.randn(5, 4)).sum().backward()
    assert hooks.get_all_data() == {"GradientHook": {}}
    assert "memory_percent" in tracer.SystemMetrics().capture()


@pytest.mark.slow
def test_callbacks_of_trainers_take_the_configuration() -> None:
    transformers = tracer.TransformersCallback(project="p", checkpoint_interval=50)
    lightning = tracer.LightningCallback(project="p", run_name="n")
    assert type(transformers).__module__ == "sonde.adapters.transformers"
    assert type(lightning).__module__ == "sonde.adapters.lightning"
    from sonde.adapters.lightning import TracerCallback as Lightning
    from sonde.adapters.transformers import TracerCallback as Transformers

    assert isinstance(transformers, Transformers)
    assert isinstance(lightning, Lightning)
