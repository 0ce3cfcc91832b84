"""ParamLake's decorator, settings, stores and analyzers: every name it documents exists and does what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.compat import paramlake as compat
from sonde.errors import UnknownNameError, UsageError
from sonde.schema.snapshots.tensors import HostTensor, Snapshot

mpl.use("Agg")

NAMES = """
paramlake WeightCollector GradientCollector ActivationCollector StorageInterface create_storage_manager ZarrManager
ZarrAnalyzer IcechunkManager IcechunkAnalyzer load_config layer_type tensor_name
"""
DECORATED = """
from paramlake import paramlake

@paramlake(output_path="data/mnist.zarr", run_id="first", capture_frequency=5, capture_weights=True,
           capture_gradients=True)
def train():
    return fit(model)

answer = train()
"""
DIRECT = """
from paramlake import paramlake

model = paramlake(model, config="paramlake.yaml", capture_gradients=False)
fit(model)
"""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def fit(model: nn.Module) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(11):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return "done"


def test_every_documented_name_exists() -> None:
    assert set(NAMES.split()) <= set(compat.__all__)
    assert [name for name in compat.__all__ if not hasattr(compat, name)] == []


def test_a_decorated_function_is_recorded(run_snippet: Any) -> None:
    model = net()
    before = model[0].weight.detach().clone()
    assert run_snippet(DECORATED, "paramlake", {"fit": fit, "model": model})["answer"] == "done"
    run = sonde.open("mnist/first", dir="data")
    assert run.status == "finished"
    analyzer = compat.ZarrAnalyzer("data/mnist.zarr")
    summary = analyzer.get_model_summary()
    assert (summary["run_id"], summary["steps"], summary["layers"]) == ("first", 3, ["0", "2"])
    weight = analyzer.get_tensor_data("0", "weights", "weight", step=0)
    assert np.array_equal(weight, before.numpy())
    assert analyzer.get_tensor_data("2", "gradients", "bias").shape == (3, 2)
    stats = analyzer.get_layer_stats("0", "weights", "weight", step=0)
    assert stats["l2_norm"] == pytest.approx(before.norm().item())
    assert set(analyzer.get_gradient_stats()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for figure in (analyzer.plot_weight_evolution("0"), analyzer.plot_gradient_norm_by_layer()):
        assert figure.axes[0].lines or figure.axes[0].collections or figure.axes[0].images
    assert analyzer.compare_with(analyzer).first_divergence is None
    with pytest.raises(UnknownNameError, match="tensor type"):
        analyzer.get_tensor_data("0", "wieghts")


def test_a_model_is_recorded_by_a_file_of_settings(run_snippet: Any) -> None:
    Path("paramlake.yaml").write_text(
        "output_path: lake/run.zarr\ncapture_frequency: 10\ncapture_gradients: true\ninclude_layers: ['2']\n"
        "compression: {algorithm: zstd}\nstorage_backend: icechunk\n"
    )
    run_snippet(DIRECT, "paramlake", {"fit": fit, "model": net()})
    sonde.finish()
    run = sonde.open("lake/latest")
    assert run.config["paramlake"]["compression"]["algorithm"] == "zstd"
    analyzer = compat.IcechunkAnalyzer(run.path)
    assert analyzer.get_history() == [0, 10]
    assert set(run.tensors.snapshot(0)) == {"param/2.weight", "param/2.bias"}


def test_collectors_keep_a_snapshot_on_request() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.init(project="p", verbose=False) as session:
        session.watch(model, optimizer)
        compat.GradientCollector(session).collect()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert set(sonde.open("latest").tensors.snapshot(0, "*/0.weight")) == {"grad/0.weight"}
    assert compat.WeightCollector.kinds + compat.ActivationCollector.kinds == ("param", "act")


@pytest.mark.parametrize("backend", ["zarr", "icechunk"])
def test_stores_follow_one_interface(backend: str, tmp_path: Path) -> None:
    store = compat.create_storage_manager({"storage_backend": backend}, tmp_path)
    assert isinstance(store, compat.StorageInterface)
    store.write(Snapshot(3, 0.0, "", {"param/w": HostTensor.of(np.ones(4, np.float32))}))
    store.close()
    again = {"zarr": compat.ZarrManager, "icechunk": compat.IcechunkManager}[backend](tmp_path)
    assert again.steps() == [3]
    again.close()


def test_settings_are_merged_and_checked() -> None:
    Path("lake.yaml").write_text("compression: {algorithm: zstd, level: 3}\n")
    config = compat.load_config("lake.yaml", compression={"level": 5}, capture_weights=False)
    assert config["compression"] == {"algorithm": "zstd", "level": 5}
    assert config.kinds == ("param", "grad")  # running statistics are part of the parameters' kind
    with pytest.raises(UnknownNameError, match=r'"capture_wieghts". Did you mean "capture_weights"'):
        compat.paramlake(net(), capture_wieghts=True)
    with pytest.raises(UnknownNameError, match="storage_backend"):
        compat.load_config(storage_backend="hdf5")
    with pytest.raises(UsageError, match="at least 1"):
        compat.load_config(capture_frequency=0)
    with pytest.raises(UsageError, match="nothing to capture"):
        _ = compat.load_config(capture_weights=False, capture_non_trainable=False, capture_gradients=False).kinds
    with pytest.raises(UsageError, match="a model or a function"):
        compat.paramlake(3)


def test_names_and_types_are_those_of_every_framework() -> None:
    assert compat.layer_type("Dense") == compat.layer_type("Linear") == "Linear"
    names = ["dense/kernel:0", "params/Dense_0/kernel", "fc.weight"]
    assert [compat.tensor_name(name) for name in names] == ["dense.weight", "Dense_0.weight", "fc.weight"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Keras uses what NumPy deprecates
def test_keras_models_are_recorded() -> None:
    import keras

    def build() -> Any:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, name="dense")])
        model.compile("sgd", "mse")
        return model

    def train(model: Any) -> None:
        model.fit(np.ones((8, 4), np.float32), np.ones((8, 3), np.float32), batch_size=4, epochs=2, verbose=0)

    train(compat.paramlake(build(), output_path="lake/direct.zarr"))
    compat.paramlake(train, output_path="lake/function.zarr")(build())
    for project in ("direct", "function"):
        (run,) = sonde.runs("lake", project)
        assert run.last_step == 3
        assert any("kernel" in site for site in run.stats("grad/*/norm")["site"].to_pylist())
