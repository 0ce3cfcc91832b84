"""The names of LayerClaw (the package `tracer`): `import tracer` becomes `from sonde.compat import tracer`.

`init`, `log`, `step`, `watch` and `finish` record a run of sonde; the storage, the queries and the anomalies read one.
Nothing is written in LayerClaw's own format, but its tables are there for SQL: docs/sql.md.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from sonde.errors import RunNotFoundError, SessionError, UsageError
from sonde.run import Run, compare
from sonde.run import open as open_run
from sonde.run import runs as list_runs
from sonde.session import NullSession, Session
from sonde.session import init as start_session
from sonde.show.trash import delete_run
from sonde.write.system import SystemSampler

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "AnomalyDetector",
    "GlobalState",
    "GradientHook",
    "HookManager",
    "LightningCallback",
    "QueryEngine",
    "StorageBackend",
    "SystemMetrics",
    "TracerConfig",
    "TrainingTracer",
    "TransformersCallback",
    "finish",
    "get_run_id",
    "get_step",
    "init",
    "log",
    "step",
    "watch",
]


@dataclass
class TracerConfig:
    """The configuration of a run. `checkpoint_interval`, `capture_samples`, `async_writes`, `write_buffer_size` and
    `max_workers` have no effect: sonde records every step, on a separate thread, within its budget."""

    project_name: str
    run_name: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    storage_path: str | None = None
    """The folder of runs; by default the one of sonde, `runs`."""
    retention_days: int = 30
    """No effect: runs are deleted only on request, by `sonde delete`."""
    checkpoint_interval: int = 1000
    capture_samples: int = 5
    track_gradients: bool = True
    track_system_metrics: bool = True
    gradient_layers: list[str] | None = None
    """Only parameters whose name contains one of these."""
    async_writes: bool = True
    write_buffer_size: int = 100
    max_workers: int = 4
    custom_metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = {
            "checkpoint_interval": 1, "capture_samples": 0, "retention_days": 0, "write_buffer_size": 1,
            "max_workers": 1,
        }  # fmt: skip
        for name, least in limits.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name}= must be at least {least}; got {getattr(self, name)}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class TrainingTracer:
    """One recording: a session of sonde under LayerClaw's names."""

    def __init__(self, config: TracerConfig) -> None:
        self.config = config
        self.step_count = 0
        self.session: Session | NullSession = start_session(**_options(config))
        self.run_id = "" if self.session.path is None else open_run(self.session.path).id

    def attach_hooks(self, model: nn.Module) -> None:
        """Record this model; hooks of sonde leave no trace on it."""
        layers = self.config.gradient_layers
        sites = "*" if layers is None else [f"*{layer}*" for layer in layers]
        self.session.watch(model, grads=self.config.track_gradients, sites=sites)

    watch = attach_hooks

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.session.log(metrics)

    def step(self) -> None:
        """Count a step. If the optimizer of a watched model steps, those steps are the ones of the run."""
        self.step_count += 1
        self.session.step()

    def finish(self) -> None:
        self.session.finish()


def _options(config: TracerConfig) -> dict[str, Any]:
    """The keywords of `sonde.init`."""
    given = {
        "project": config.project_name, "name": config.run_name, "tags": config.tags, "notes": config.notes,
        "dir": config.storage_path, "config": config.to_dict(), "system_metrics": config.track_system_metrics,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


# ----------------------------------------------------------------------------------------------- the state of a process


class GlobalState:
    """The tracer of this process. There is one object of this class."""

    _one: Any = None
    _lock: Final = threading.Lock()
    tracer: TrainingTracer | None

    def __new__(cls) -> Self:
        with cls._lock:
            if cls._one is None:
                cls._one = super().__new__(cls)
                cls._one.tracer = None
            found: Self = cls._one
            return found

    @property
    def config(self) -> TracerConfig | None:
        return None if self.tracer is None else self.tracer.config

    @property
    def run_id(self) -> str | None:
        return None if self.tracer is None else self.tracer.run_id

    @property
    def step_count(self) -> int:
        return 0 if self.tracer is None else self.tracer.step_count

    def is_initialized(self) -> bool:
        return self.tracer is not None

    def reset(self) -> None:
        self.tracer = None

    def required(self) -> TrainingTracer:
        if self.tracer is None:
            raise SessionError("no run has started. Call tracer.init(project=...) first.")
        return self.tracer


_state: Final = GlobalState()


def init(project: str, run_name: str | None = None, **kwargs: Any) -> TrainingTracer:
    """Start a run. The other keywords are those of `TracerConfig`."""
    if _state.tracer is not None:
        raise SessionError("a run has started already. Call tracer.finish() before the next tracer.init(...).")
    _state.tracer = TrainingTracer(TracerConfig(project_name=project, run_name=run_name, **kwargs))
    return _state.tracer


def log(metrics: Mapping[str, Any]) -> None:
    """Record numbers at the current step."""
    _state.required().log(metrics)


def step() -> None:
    """Count a step; call it at the end of each."""
    _state.required().step()


def watch(model: nn.Module) -> None:
    """Record the gradients, weights, updates and activations of a model."""
    _state.required().attach_hooks(model)


def finish() -> None:
    """End the run."""
    _state.required().finish()
    _state.reset()


def get_run_id() -> str:
    return _state.required().run_id


def get_step() -> int:
    """The number of steps since `init`."""
    return _state.step_count


# ----------------------------------------------------------------------------------------- hooks and system, on request


class GradientHook:
    """Statistics of each parameter's gradient in the last backward pass, for programs that read them at once.

    Recording does not need it. Numbers stay on the device until `get_data`.
    """

    def __init__(self, config: TracerConfig | None = None) -> None:
        self.layers = None if config is None else config.gradient_layers
        self._handles: list[Any] = []
        self._found: dict[str, Tensor] = {}

    def attach(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (self.layers is None or any(layer in name for layer in self.layers)):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._receiver(name)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def get_data(self) -> dict[str, dict[str, float]]:
        """By parameter: norm, mean, std, max, min, num_zeros, num_nans, num_infs."""
        return {name: dict(zip(_MEASURES, row.tolist(), strict=True)) for name, row in self._found.items()}

    def reset(self) -> None:
        self._found.clear()

    def _receiver(self, name: str) -> Any:
        def receive(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._found[name] = _measured(parameter.grad)

        return receive


_MEASURES: Final = ("norm", "mean", "std", "max", "min", "num_zeros", "num_nans", "num_infs")


def _measured(grad: Tensor) -> Tensor:
    import torch

    flat = grad.detach().flatten().double()
    counts = (flat == 0).sum(), flat.isnan().sum(), flat.isinf().sum()
    return torch.stack([flat.norm(), flat.mean(), flat.std(unbiased=False), flat.max(), flat.min(), *counts])


class HookManager:
    """The hooks of a configuration, attached and detached together."""

    def __init__(self, config: TracerConfig) -> None:
        self.hooks = [GradientHook(config)] if config.track_gradients else []

    def attach_all(self, model: nn.Module) -> None:
        for hook in self.hooks:
            hook.attach(model)

    def detach_all(self) -> None:
        for hook in self.hooks:
            hook.detach()

    def get_all_data(self) -> dict[str, Any]:
        return {type(hook).__name__: hook.get_data() for hook in self.hooks}

    def reset_all(self) -> None:
        for hook in self.hooks:
            hook.reset()


class SystemMetrics:
    """CPU, memory and GPUs now. A run records the same readings by itself."""

    def __init__(self, config: TracerConfig | None = None) -> None:
        self._sampler = SystemSampler(Path())

    def capture(self) -> dict[str, float]:
        """Readings by name, as in `run.system()`."""
        return dict(self._sampler.sample(step=-1).values)


# ---------------------------------------------------------------------------------------------------------- stored runs


class StorageBackend:
    """Reads the runs of a folder in LayerClaw's tables. To write one, use `init`."""

    def __init__(self, config: TracerConfig | str | Path | None = None) -> None:
        self.path = config.storage_path if isinstance(config, TracerConfig) else config

    def open(self, run_id: str) -> Run:
        """The run with this id or name."""
        return open_run(run_id, dir=self.path)

    def get_run(self, run_id: str) -> dict[str, Any] | None:
        """Its row in the table `runs`; None if there is no such run."""
        try:
            return self._rows(run_id, "runs")[0]
        except RunNotFoundError:
            return None

    def list_runs(
        self, project_name: str | None = None, status: Any = None, limit: int | None = 100
    ) -> list[dict[str, Any]]:
        """The rows of the newest runs."""
        found = list_runs(self.path, project_name, status=status, limit=limit)
        return [run.sql("select * from runs").to_pylist()[0] for run in found]

    def get_checkpoints(self, run_id: str) -> list[dict[str, Any]]:
        """The metrics of each step."""
        return self._rows(run_id, "checkpoints")

    def get_gradient_stats(self, run_id: str) -> list[dict[str, Any]]:
        return self._rows(run_id, "gradient_stats")

    def get_system_metrics(self, run_id: str) -> list[dict[str, Any]]:
        return self._rows(run_id, "system_metrics")

    def get_anomalies(self, run_id: str) -> list[dict[str, Any]]:
        return self._rows(run_id, "anomalies")

    def get_metric_timeseries(self, run_id: str, metric_name: str) -> dict[str, list[Any]]:
        table = self.open(run_id).scalars(metric_name, exact=True)
        return {"steps": table["step"].to_pylist(), "values": table["value"].to_pylist()}

    def delete_run(self, run_id: str) -> None:
        """Move the run to the trash, as `sonde delete` does."""
        delete_run(self.open(run_id), dir=self.path)

    def close(self) -> None:
        """Nothing is kept open."""

    def _rows(self, run_id: str, table: str) -> list[dict[str, Any]]:
        query = f"select * from {table}"  # noqa: S608 - one of the names above
        return self.open(run_id).sql(query, limit=_MAX_ROWS).to_pylist()


_MAX_ROWS: Final = 1_000_000


class QueryEngine:
    """Summaries of runs, comparisons, and the step at which two runs diverge."""

    def __init__(self, storage_path: str | Path | None = None) -> None:
        self.storage = StorageBackend(storage_path)

    def get_run_summary(self, run_id: str) -> dict[str, Any]:
        """The run's row, with the last value of each logged metric under `final_metrics`, and its health."""
        run = self.storage.open(run_id)
        row = run.sql("select * from runs").to_pylist()[0]
        last = {name: float(values[-1]) for name, (_, values) in run.scalar_lines().items() if "/" not in name}
        findings = [finding.rule for finding in run.findings()]
        return {**row, "final_metrics": last, "anomalies": findings}

    def compare_runs(self, run_id1: str, run_id2: str, metrics: Sequence[str] | None = None) -> dict[str, Any]:
        """Both summaries, the values of the metrics side by side, what differs in the configuration, and the step
        at which they diverge."""
        both = [self.get_run_summary(name) for name in (run_id1, run_id2)]
        shared = [name for name in both[0]["final_metrics"] if name in both[1]["final_metrics"]]
        result = compare(self.storage.open(run_id1), self.storage.open(run_id2))
        return {
            "run1": both[0],
            "run2": both[1],
            "metrics": {
                name: {"run1": both[0]["final_metrics"].get(name), "run2": both[1]["final_metrics"].get(name)}
                for name in (shared if metrics is None else metrics)
            },
            "config_diff": result.config.to_pylist(),
            "divergence_point": None if result.first_divergence is None else result.first_divergence.step,
        }

    def find_divergence(self, run_id1: str, run_id2: str) -> int | None:
        """The first step whose difference rounding does not explain; None if there is none."""
        found = compare(self.storage.open(run_id1), self.storage.open(run_id2)).first_divergence
        return None if found is None else found.step

    def find_anomalous_checkpoints(
        self, run_id: str, anomaly_types: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The rows of `anomalies`; of these types if there are any."""
        rows = self.storage.get_anomalies(run_id)
        return [row for row in rows if anomaly_types is None or row["anomaly_type"] in anomaly_types]


class AnomalyDetector:
    """Runs sonde's rules on a recorded run. The types of anomalies are the names of rules."""

    def __init__(self, storage: StorageBackend | str | Path | None = None) -> None:
        self.storage = storage if isinstance(storage, StorageBackend) else StorageBackend(storage)

    def detect_all_anomalies(self, run_id: str) -> list[dict[str, Any]]:
        """The anomalies, most likely cause first; nothing has to be stored."""
        run = self.storage.open(run_id)
        return [
            {
                "run_id": run.id,
                "step": finding.step,
                "anomaly_type": finding.rule,
                "severity": str(finding.severity),
                "details": {"message": finding.message, "sites": list(finding.sites), "remedy": finding.remedy},
            }
            for finding in run.findings()
        ]

    def detect_gradient_anomalies(self, run_id: str) -> list[dict[str, Any]]:
        return self._detect(run_id, "gradient", "rnn_", "residual_decay")

    def detect_loss_anomalies(self, run_id: str) -> list[dict[str, Any]]:
        return self._detect(run_id, "loss_")

    def detect_nan_inf(self, run_id: str) -> list[dict[str, Any]]:
        return self._detect(run_id, "nan_inf", "low_precision_overflow")

    def detect_memory_spikes(self, run_id: str) -> list[dict[str, Any]]:
        return self._detect(run_id, "memory")

    def _detect(self, run_id: str, *parts: str) -> list[dict[str, Any]]:
        found = self.detect_all_anomalies(run_id)
        return [anomaly for anomaly in found if any(part in anomaly["anomaly_type"] for part in parts)]


# --------------------------------------------------------------------------------------------------------- integrations


def TransformersCallback(project: str, run_name: str | None = None, **kwargs: Any) -> Any:  # noqa: N802 - LayerClaw's name
    """The callback for Hugging Face's `Trainer`. Without arguments, import `TracerCallback` from
    `sonde.adapters.transformers`."""
    from sonde.adapters.transformers import SondeCallback

    return SondeCallback(**_options(TracerConfig(project, run_name, **kwargs)))


def LightningCallback(project: str, run_name: str | None = None, **kwargs: Any) -> Any:  # noqa: N802 - LayerClaw's name
    """The callback for Lightning's `Trainer`."""
    from sonde.adapters.lightning import SondeCallback

    return SondeCallback(**_options(TracerConfig(project, run_name, **kwargs)))
