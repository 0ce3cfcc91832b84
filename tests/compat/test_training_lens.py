"""The snippets of Training Lens run with only the import changed, and every name it documents exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import sonde
from sonde.compat import training_lens as compat
from sonde.errors import SettingsError, UsageError
from sonde.tune import EXAMPLE

pytest.importorskip("trl")

NAMES = """
TrainingWrapper CheckpointManager MetricsCollector ConfigurationManager CheckpointAnalyzer GradientAnalyzer
WeightAnalyzer StandardReports WandBIntegration HuggingFaceIntegration StorageBackends LiveAnalyzer FineTuningMethod
StorageBackend
"""
TRAINING = """
from training_lens import TrainingWrapper

wrapper = TrainingWrapper(
    model_name="meta-llama/Llama-2-7b-hf",
    training_method="lora",
    checkpoint_interval=100,
    wandb_project="my-training"
)

wrapper.train(
    dataset=dataset,
    output_dir="./checkpoints",
    num_epochs=3
)
"""
LIVE = """
from training_lens import LiveAnalyzer

analyzer = LiveAnalyzer(checkpoint_dir="./checkpoints")
analyzer.start_monitoring()  # Real-time dashboard
"""
ANALYSIS = """
from training_lens import CheckpointAnalyzer

analyzer = CheckpointAnalyzer("./checkpoints")
report = analyzer.generate_standard_report()
raw_data = analyzer.export_raw_gradients()
"""
EXTENDED = """
from training_lens import FineTuningMethod, StorageBackend

class Mine(FineTuningMethod):
    def setup_training(self, model, config): return model

    def train_step(self, batch): pass

    def save_checkpoint(self, path): pass

class Elsewhere(StorageBackend):
    def save_checkpoint(self, checkpoint, metadata): pass

    def load_checkpoint(self, checkpoint_id): pass

    def list_checkpoints(self): return []

class Unfinished(StorageBackend):
    def list_checkpoints(self): return []
"""


def test_every_documented_name_exists() -> None:
    assert set(NAMES.split()) <= set(compat.__all__)
    assert [name for name in compat.__all__ if not hasattr(compat, name)] == []


def test_extension_points_are_abstract(run_snippet: Any) -> None:
    found = run_snippet(EXTENDED, "training_lens", {})
    assert found["Mine"]().setup_training(nn.Linear(1, 1), None) is not None
    assert found["Elsewhere"]().list_checkpoints() == []
    with pytest.raises(TypeError, match="abstract"):
        found["Unfinished"]()


def small_llama(folder: Path) -> None:
    """A saved model under the name that the snippet asks for."""
    from sonde.tune.config import ModelConfig
    from sonde.tune.methods import find_method
    from sonde.tune.train.model import load_model, load_tokenizer

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ModelConfig(architecture="llama", options={**sizes, "num_key_value_heads": 1})
    tokenizer = load_tokenizer(config, ["one two three four"])
    load_model(config, find_method("lora"), None, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.slow
def test_training_monitoring_and_analysis(
    run_snippet: Any, offline_wandb: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    small_llama(Path("meta-llama/Llama-2-7b-hf"))
    dataset = ["one two three four", "two three four one"] * 8
    run_snippet(TRAINING, "training_lens", {"dataset": dataset})
    run_snippet(LIVE, "training_lens", {})
    assert "loss" in capfd.readouterr().out
    found = run_snippet(ANALYSIS, "training_lens", {})
    assert "Training convergence" in found["report"].text
    assert any("lora_B" in name for name in found["raw_data"])

    gradients = compat.GradientAnalyzer("./checkpoints")
    assert gradients.analyze()["verdict"]
    steps, norms = next(iter(gradients.gradient_norms("*lora_B*").values()))
    assert len(steps) == len(norms) == 6
    assert gradients.update_magnitudes()
    assert gradients.export(pattern="*lora_B*").keys() <= found["raw_data"].keys()
    weights = compat.WeightAnalyzer("./checkpoints")
    assert weights.analyze()["verdict"]
    assert any(name.endswith("/std") for name in weights.distributions("*lora_A*"))
    reports = compat.StandardReports("./checkpoints")
    assert reports.generate(save_to="report.html").text == found["report"].text
    assert Path("report.html").is_file()
    for part in (reports.training_convergence, reports.gradient_flow, reports.weight_evolution, reports.overfitting):
        assert part()["verdict"]


def test_metrics_of_your_own_loop_are_collected() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collector = compat.MetricsCollector(project="lens", verbose=False)
    collector.setup(model, optimizer)
    for step in range(3):
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        collector.collect_step_metrics(step, {"loss": loss})
    assert collector.get_step_metrics(2)["loss"] == pytest.approx(loss.item())
    assert set(collector.get_all_metrics()) == {0, 1, 2}
    collector.finish()
    assert len(sonde.open("latest").stats("grad/weight/norm")) == 3
    with sonde.init(project="outer", verbose=False) as session:
        inner = compat.MetricsCollector()
        assert inner.session is session
        inner.finish()
        assert not session.is_finished


def test_configuration_is_loaded_checked_and_saved(tmp_path: Path) -> None:
    Path("tune.yaml").write_text(EXAMPLE)
    manager = compat.ConfigurationManager("tune.yaml", ["method.r=4"])
    assert manager.config.method.r == 4
    again = compat.ConfigurationManager(manager.save(tmp_path / "whole.yaml"))
    assert again.config == manager.config
    with pytest.raises(SettingsError, match=r'no key "method\.rank"'):
        compat.ConfigurationManager({**yaml.safe_load(EXAMPLE), "method": {"rank": 3}})


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    compat.CheckpointManager(tmp_path, model=nn.Linear(1, 1), interval=None).save(1)
    with pytest.raises(UsageError, match="refers to no run"):
        compat.GradientAnalyzer(tmp_path).gradient_norms()
    assert compat.WeightAnalyzer(tmp_path).analyze()["title"]


@pytest.mark.slow
def test_numbers_of_your_own_go_to_wandb(offline_wandb: Any) -> None:
    integration = compat.WandBIntegration("mine", "first", config={"lr": 0.1})
    integration.log_metrics({"loss": 1.0}, step=0)
    integration.add_tag("a")
    assert integration.is_active
    assert (integration.run.project, integration.run.name, integration.run.tags) == ("mine", "first", ("a",))
    integration.finish()
    assert not integration.is_active
    assert integration.get_run_url() is None
