"""The names of Training Lens: `from training_lens import …` becomes `from sonde.compat.training_lens import …`.

Training, checkpoints and their analysis are those of `sonde.tune`. The other names are thin classes on the same parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonde.errors import UsageError
from sonde.session import NullSession, Session, active_session
from sonde.session import init as start_session
from sonde.tune import (
    CheckpointAnalyzer,
    CheckpointManager,
    FineTuningMethod,
    LiveAnalyzer,
    LocalStorage,
    StandardReport,
    StorageBackend,
    TrainingWrapper,
    load_config,
)
from sonde.tune.config import TuneConfig, checked

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "CheckpointAnalyzer",
    "CheckpointManager",
    "ConfigurationManager",
    "FineTuningMethod",
    "GradientAnalyzer",
    "HuggingFaceIntegration",
    "LiveAnalyzer",
    "LocalStorage",
    "MetricsCollector",
    "StandardReports",
    "StorageBackend",
    "StorageBackends",
    "TrainingWrapper",
    "WandBIntegration",
    "WeightAnalyzer",
]

Folder = str | os.PathLike[str]
StorageBackends = StorageBackend


class MetricsCollector:
    """Records a loop of your own: every gradient, weight and update, and the metrics you pass.

    collector = MetricsCollector(project="mine")
    collector.setup(model, optimizer)
    for step in range(100):
        collector.collect_step_metrics(step, {"loss": loss})
    collector.finish()
    """

    def __init__(self, **init: Any) -> None:
        """The keywords are those of `sonde.init`. A session that is open is used, and left open."""
        found = active_session()
        self._is_own = not isinstance(found, Session)
        self.session: Session | NullSession = start_session(**init) if found is None or self._is_own else found

    def setup(self, model: nn.Module, optimizer: Any = None) -> None:
        self.session.watch(model, optimizer)

    def collect_step_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of this step."""
        self.session.log(metrics, step)

    def get_step_metrics(self, step: int) -> dict[str, float]:
        """All numbers that are stored of a step."""
        return self.get_all_metrics().get(step, {})

    def get_all_metrics(self) -> dict[int, dict[str, float]]:
        """By step and name; empty if recording is disabled."""
        from sonde.run import open as open_run

        found: dict[int, dict[str, float]] = {}
        if self.session.path is None:
            return found
        self.session.flush()
        for name, (steps, values) in open_run(self.session.path).scalar_lines().items():
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                found.setdefault(step, {})[name] = value
        return found

    def finish(self) -> None:
        if self._is_own:
            self.session.finish()


class ConfigurationManager:
    """Loads, checks and saves a configuration of `sonde train`.

    config = ConfigurationManager("tune.yaml", ["training.learning_rate=1e-3"]).config
    """

    def __init__(self, config: Folder | Mapping[str, Any], overrides: Iterable[str] = ()) -> None:
        self.config: TuneConfig = (
            checked(TuneConfig, config) if isinstance(config, Mapping) else load_config(Path(config), overrides)
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration, with defaults."""
        return self.config.model_dump(mode="json")

    def save(self, path: Folder) -> Path:
        """Write the whole configuration as YAML."""
        import yaml

        target = Path(path)
        target.write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")
        return target


class StandardReports:
    """The standard report of a folder of checkpoints or a run, and its parts: text, numbers and curves."""

    def __init__(self, checkpoint_dir: Folder) -> None:
        self.analyzer = CheckpointAnalyzer(checkpoint_dir)

    def generate(self, save_to: Folder | None = None) -> StandardReport:
        """The whole report; with `save_to`, also as .html, .json or .txt."""
        return self.analyzer.generate_standard_report(save_to)

    def training_convergence(self) -> dict[str, Any]:
        return self._part("convergence")

    def gradient_flow(self) -> dict[str, Any]:
        return self._part("gradient_flow")

    def weight_evolution(self) -> dict[str, Any]:
        return self._part("weight_evolution")

    def overfitting(self) -> dict[str, Any]:
        return self._part("overfitting")

    def _part(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.generate().as_dict()[name]
        return found


class GradientAnalyzer:
    """The gradients of a run that Training Lens' words ask for: norms by layer, flow, updates."""

    def __init__(self, checkpoint_dir: Folder) -> None:
        self.reports = StandardReports(checkpoint_dir)

    def analyze(self) -> dict[str, Any]:
        """How gradients change along the depth and over the training, with a verdict."""
        return self.reports.gradient_flow()

    def gradient_norms(self, pattern: str = "*") -> dict[str, Any]:
        """By parameter: steps and norms."""
        return self._lines(f"grad/{pattern}/norm")

    def update_magnitudes(self, pattern: str = "*") -> dict[str, Any]:
        """By parameter: steps and norm of the update divided by that of the weight."""
        return self._lines(f"update/{pattern}/ratio")

    def export(self, path: Folder | None = None, pattern: str = "*") -> Mapping[str, Any]:
        """Whole gradients if they were kept, otherwise their statistics."""
        return self.reports.analyzer.export_raw_gradients(path, pattern)

    def _lines(self, pattern: str) -> dict[str, Any]:
        run = self.reports.analyzer.run
        if run is None:
            raise UsageError(f"{self.reports.analyzer.folder} refers to no run, and gradients are recorded in runs.")
        return {name.split("/")[1]: line for name, line in run.lines(pattern).items()}


class WeightAnalyzer:
    """How far weights moved between checkpoints, and how their values are distributed."""

    def __init__(self, checkpoint_dir: Folder) -> None:
        self.reports = StandardReports(checkpoint_dir)

    def analyze(self) -> dict[str, Any]:
        """The change from checkpoint to checkpoint, by layer, with a verdict."""
        return self.reports.weight_evolution()

    def distributions(self, pattern: str = "*", stats: Iterable[str] = ("mean", "std", "max_abs")) -> dict[str, Any]:
        """By parameter and stat: steps and values."""
        run = self.reports.analyzer.run
        if run is None:
            raise UsageError(f"{self.reports.analyzer.folder} refers to no run, and statistics are recorded in runs.")
        lines = run.lines([f"param/{pattern}/{stat}" for stat in stats])
        return {name.removeprefix("param/"): line for name, line in lines.items()}


class WandBIntegration:
    """A run on Weights & Biases for numbers of your own. To forward what sonde records, use `mirror="wandb"`."""

    def __init__(self, project: str, run_name: str | None = None, config: Mapping[str, Any] | None = None) -> None:
        from sonde.schema.packages import require

        self.run: Any = require("wandb", "wandb", "WandBIntegration").init(
            project=project, name=run_name, config=dict(config or {}), reinit="create_new"
        )

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.run.log(dict(metrics), step=step)

    def add_tag(self, tag: str) -> None:
        self.run.tags = (*(self.run.tags or ()), tag)

    @property
    def is_active(self) -> bool:
        return self.run is not None

    def get_run_url(self) -> str | None:
        return None if self.run is None else self.run.url

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
        self.run = None


class HuggingFaceIntegration:
    """A repository on the Hugging Face Hub: checkpoints and models go to a model repository, runs to a dataset one."""

    def __init__(
        self, repo_id: str, token: str | None = None, private: bool = True, endpoint: str | None = None
    ) -> None:
        self.repo_id, self.private = repo_id, private
        self._where = {"token": token, "endpoint": endpoint}

    def upload_checkpoint(self, path: Folder) -> str:
        """Upload a folder with weights. Returns the URL of the commit."""
        from sonde.adapters.huggingface_hub import push

        return push(path, self.repo_id, private=self.private, **self._where)

    upload_final_model = upload_checkpoint

    def download_checkpoint(self, into: Folder) -> Path:
        """Download the files of the model repository into a new folder."""
        from sonde.adapters.huggingface_hub import pull_checkpoint

        return pull_checkpoint(self.repo_id, into=into, **self._where)

    def upload_run(self, run: Any) -> str:
        """Upload a run, or a report, to the dataset repository."""
        from sonde.adapters.huggingface_hub import push

        return push(run, self.repo_id, private=self.private, **self._where)

    def download_runs(self, dir: Folder = "runs") -> list[Path]:
        """Download every run of the dataset repository into a folder of runs."""
        from sonde.adapters.huggingface_hub import pull

        return pull(self.repo_id, dir=dir, **self._where)
