"""The names of ParamLake: `from paramlake import paramlake` becomes `from sonde.compat.paramlake import paramlake`.

The decorator records a run of sonde with snapshots of whole tensors: Zarr by default, Icechunk on request. Analyzers
read them. docs/compat.md lists the settings.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import UnknownNameError, UsageError
from sonde.run import Run, compare
from sonde.run import open as open_run
from sonde.run import runs as list_runs
from sonde.schema.frameworks.layouts import layer_type, split_name
from sonde.session import NullSession, Session, Snapshots
from sonde.session import init as start_session
from sonde.write.tensors.store import Store, open_store

__all__ = [
    "ActivationCollector",
    "GradientCollector",
    "IcechunkAnalyzer",
    "IcechunkManager",
    "ParamLakeConfig",
    "StorageInterface",
    "WeightCollector",
    "ZarrAnalyzer",
    "ZarrManager",
    "create_storage_manager",
    "layer_type",
    "load_config",
    "paramlake",
    "tensor_name",
]

StorageInterface = Store
KINDS: Final = {"weights": "param", "gradients": "grad", "activations": "act", "optimizer": "optim"}
"""ParamLake's types of tensors, and the kinds of a snapshot."""
DEFAULTS: Final[Mapping[str, Any]] = {
    "output_path": None,
    "run_id": None,
    "capture_frequency": 1,
    "capture_weights": True,
    "capture_non_trainable": True,
    "capture_gradients": True,
    "capture_activations": False,
    "capture_optimizer": False,
    "gradients": {},
    "include_layers": None,
    "exclude_layers": None,
    "include_types": None,
    "compression": {},
    "chunking": {},
    "activations": {},
    "storage_backend": "zarr",
    "icechunk": {},
    "adaptive_collection": True,
    "memory_threshold": 80,
    "memory_check_interval": 10,
    "async_writes": True,
    "buffer_size": None,
}
"""Every setting, with its default."""


class ParamLakeConfig(dict[str, Any]):
    """A checked configuration: known settings only, defaults below YAML below keywords."""

    def __init__(self, *layers: Mapping[str, Any]) -> None:
        merged: dict[str, Any] = dict(DEFAULTS)
        for layer in layers:
            for name in layer:
                if name not in DEFAULTS:
                    raise UnknownNameError("ParamLake setting", name, DEFAULTS)
            merged = _merged(merged, layer)
        if int(merged["capture_frequency"]) < 1:
            raise UsageError(f"capture_frequency= must be at least 1; got {merged['capture_frequency']}.")
        if merged["storage_backend"] not in ("zarr", "icechunk"):
            raise UnknownNameError("storage_backend", str(merged["storage_backend"]), ("zarr", "icechunk"))
        super().__init__(merged)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors to keep."""
        wanted = {
            "param": self["capture_weights"] or self["capture_non_trainable"],
            "grad": self["capture_gradients"],
            "act": self["capture_activations"],
            "optim": self["capture_optimizer"],
        }
        found = tuple(kind for kind, is_wanted in wanted.items() if is_wanted)
        if not found:
            raise UsageError("nothing to capture: set capture_weights, capture_gradients or capture_activations.")
        return found

    @property
    def plan(self) -> Snapshots:
        """The same as `snapshots=` of `sonde.watch`."""
        return Snapshots(
            when=int(self["capture_frequency"]),
            kinds=self.kinds,
            sites=self.sites,
            store=self["icechunk"].get("url") or self["storage_backend"],
        )

    @property
    def sites(self) -> Any:
        """Layers to include, by name or type, and to exclude."""
        include, exclude = self["include_layers"], self["exclude_layers"] or ()
        types = self["include_types"]
        if include is None and not exclude and types is None:
            return "*"

        def is_wanted(name: str, module: Any) -> bool:
            layers = set(_layers_of(name))
            if layers & set(exclude) or (include is not None and not layers & set(include)):
                return False
            return types is None or type(module).__name__ in types or layer_type(type(module).__name__) in types

        return is_wanted

    @property
    def run(self) -> dict[str, Any]:
        """The keywords of `sonde.init`: the last folder of `output_path` is the project, `run_id` the name."""
        found: dict[str, Any] = {"config": {"paramlake": dict(self)}}
        if self["run_id"] is not None:
            found["name"] = str(self["run_id"])
        if self["output_path"] is not None:
            path = Path(os.fspath(self["output_path"]))
            found |= {"dir": path.parent, "project": path.stem}
        return found


def load_config(path: str | os.PathLike[str] | None = None, **settings: Any) -> ParamLakeConfig:
    """The settings of a YAML file, with keywords on top."""
    if path is None:
        return ParamLakeConfig(settings)
    import yaml

    content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if not isinstance(content, Mapping):
        raise UsageError(f'{path} has no settings; write them as "name: value" lines.')
    return ParamLakeConfig(content, settings)


def _merged(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` on top of `base`, group by group."""
    both = dict(base)
    for name, value in above.items():
        is_group = isinstance(value, Mapping) and isinstance(both.get(name), Mapping)
        both[name] = _merged(both[name], value) if is_group else value
    return both


def _layers_of(name: str) -> list[str]:
    """Every name a site's layer may have: `encoder.0.fc.weight` -> encoder, encoder.0, encoder.0.fc, fc, …"""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))] + parts


# ------------------------------------------------------------------------------------------------------------ decorator


def paramlake(target: Any = None, *, config: Any = None, **settings: Any) -> Any:
    """Record a model, or the model that a function trains, with snapshots of whole tensors.

    @paramlake(output_path="data/mnist.zarr", capture_frequency=10)
    def train(): ...

    model = paramlake(model, capture_gradients=True)

    `config` is a YAML file or a mapping; keywords override it.
    """
    found = ParamLakeConfig(config, settings) if isinstance(config, Mapping) else load_config(config, **settings)
    if target is None:
        return functools.partial(_applied, config=found)
    return _applied(target, config=found)


def _applied(target: Any, *, config: ParamLakeConfig) -> Any:
    if _is_keras(target):
        from sonde.adapters.keras import record_model

        record_model(target, _keras_options(config) | config.run)
        return target
    if hasattr(target, "named_modules"):
        _watch(start_session(**config.run), target, config)
        return target
    if not callable(target) or isinstance(target, type):
        raise UsageError(f"@paramlake takes a model or a function that trains one; got {type(target).__name__}.")

    @functools.wraps(target)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with start_session(**config.run) as session:
            if isinstance(session, Session):
                _find_model(session, config)
            return target(*args, **kwargs)

    return recorded


def _watch(session: Session | NullSession, model: Any, config: ParamLakeConfig) -> None:
    session.watch(model, snapshots=config.plan)


def _find_model(session: Session, config: ParamLakeConfig) -> None:
    """Record the first model that trains inside the function."""
    import sys

    from sonde.session.entry.automatic import FirstModel

    def found(model: Any, args: Any) -> None:
        _watch(session, model, config)

    search = FirstModel(found, session.recording.breaker)
    session.recording.at_finish.append(search.detach)
    if "keras" in sys.modules:
        import keras

        from sonde.adapters.keras import record_class

        session.recording.at_finish.append(record_class(keras.Model, {"session": session, **_keras_options(config)}))


def _is_keras(target: Any) -> bool:
    """Checked without importing it."""
    return any(c.__name__ == "Model" and c.__module__.partition(".")[0] == "keras" for c in type(target).__mro__)


def _keras_options(config: ParamLakeConfig) -> dict[str, Any]:
    from sonde.adapters.keras import SondeCallback

    options: dict[str, Any] = {"activations": bool(config["capture_activations"])}
    if "snapshots" in inspect.signature(SondeCallback.__init__).parameters:
        options["snapshots"] = config.plan
    return options


# ----------------------------------------------------------------------------------------------------------- collectors


class WeightCollector:
    """Keeps whole weights of the model that a session watches, whenever `collect` is called."""

    kinds: tuple[str, ...] = ("param",)

    def __init__(self, session: Session) -> None:
        self.session = session

    def collect(self) -> int | None:
        """Keep a snapshot of the next step; returns its number."""
        return self.session.snapshot(self.kinds)


class GradientCollector(WeightCollector):
    """Keeps whole gradients, as the optimizer uses them."""

    kinds = ("grad",)


class ActivationCollector(WeightCollector):
    """Keeps whole outputs of every layer."""

    kinds = ("act",)


# -------------------------------------------------------------------------------------------------------------- storage


def create_storage_manager(config: Mapping[str, Any], run: str | os.PathLike[str]) -> Store:
    """The store that a configuration names, in a run's folder."""
    plan = (config if isinstance(config, ParamLakeConfig) else ParamLakeConfig(config)).plan
    return open_store(plan.store, Path(run), dict(plan.options))


def ZarrManager(run: str | os.PathLike[str], **options: Any) -> Store:  # noqa: N802 - ParamLake's name
    """The Zarr store of a run's folder: `write`, `read`, `steps`, `delete`."""
    return open_store("zarr", Path(run), options)


def IcechunkManager(run: str | os.PathLike[str], **options: Any) -> Store:  # noqa: N802 - ParamLake's name
    """The Icechunk store of a run's folder: each snapshot is one commit."""
    return open_store("icechunk", Path(run), options)


# ------------------------------------------------------------------------------------------------------------- analysis


class ZarrAnalyzer:
    """Reads the tensors of a run, lazily: by layer, type and step.

    analyzer = ZarrAnalyzer("data/mnist.zarr")      # or a run, or its folder
    analyzer.get_tensor_data("conv1", "weights", "kernel", step=0)
    """

    def __init__(self, run: str | os.PathLike[str] | Run) -> None:
        self.run = run if isinstance(run, Run) else _open(Path(run))

    def get_model_summary(self) -> dict[str, Any]:
        tensors = self.run.tensors
        steps = tensors.snapshots().column("step").to_pylist()
        return {
            "run_id": self.run.name,
            "status": self.run.status,
            "steps": len(steps),
            "layers": self.get_layers(),
            "config": dict(self.run.config),
        }

    def get_layers(self) -> list[str]:
        """Layers with a tensor in the last snapshot."""
        names = [name.partition("/")[2] for name in self.run.tensors.snapshot("latest")]
        return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))

    def get_tensor_data(
        self, layer: str, tensor_type: str = "weights", name: str = "weight", step: int | None = None
    ) -> NDArray[Any]:
        """One tensor at a step, or over all snapshots (steps first)."""
        site = self._site(layer, tensor_type, name)
        if step is not None:
            return np.asarray(self.run.tensors.snapshot(step)[site])
        return np.asarray(self.run.tensors.get(site))

    def get_layer_stats(
        self, layer: str, tensor_type: str = "weights", name: str = "weight", step: int | str = "latest"
    ) -> dict[str, float]:
        """Mean, std, min, max and L2 norm of one tensor."""
        values = np.asarray(self.run.tensors.snapshot(step)[self._site(layer, tensor_type, name)], np.float64)
        found = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
        return {**{key: float(value) for key, value in found.items()}, "l2_norm": float(np.linalg.norm(values))}

    def get_gradient_stats(self, pattern: str = "*") -> dict[str, Any]:
        """By parameter: steps and norms of every recorded step, not only of snapshots."""
        return {name.split("/")[1]: line for name, line in self.run.lines(f"grad/{pattern}/norm").items()}

    def plot_weight_evolution(self, layer: str, name: str = "weight") -> Any:
        """A matplotlib figure of the tensor's mean, spread and extremes over the training."""
        site = self._site(layer, "weights", name).partition("/")[2]
        return self.run.plot([f"param/{site}/{stat}" for stat in ("mean", "std", "max_abs")])

    def plot_gradient_norm_by_layer(self) -> Any:
        return self.run.plot("grad/*/norm")

    def compare_with(self, other: Any) -> Any:
        """The same as `sonde.compare` of both runs."""
        return compare(self.run, other.run if isinstance(other, ZarrAnalyzer) else _open(Path(other)))

    def _site(self, layer: str, tensor_type: str, name: str) -> str:
        if tensor_type not in KINDS:
            raise UnknownNameError("tensor type", tensor_type, KINDS)
        kind = KINDS[tensor_type]
        return f"{kind}/{layer}" if kind == "act" else f"{kind}/{layer}.{name}"


class IcechunkAnalyzer(ZarrAnalyzer):
    """The same, with the versions of the repository."""

    def get_history(self) -> list[int]:
        """The steps of the snapshots; each is a commit."""
        steps: list[int] = self.run.tensors.snapshots().column("step").to_pylist()
        return steps

    def at(self, *, branch: str | None = None, tag: str | None = None, commit: str | None = None) -> Any:
        """The tensors at a version."""
        return self.run.tensors.version(branch=branch, tag=tag, commit=commit)


def _open(path: Path) -> Run:
    """A run's folder; or `output_path`, whose newest run is opened."""
    if path.is_dir() and (path / "run.json").is_file():
        return open_run(path)
    found = list_runs(path.parent, path.stem, limit=1)
    return found[0] if found else open_run(path)


def tensor_name(name: str) -> str:
    """One name for a tensor, whichever framework named it.

    >>> tensor_name("params/Dense_0/kernel"), tensor_name("dense/kernel:0")
    ('Dense_0.weight', 'dense.weight')
    """
    *layers, leaf = split_name(name)
    return ".".join([*layers, _LEAVES.get(leaf, leaf)])


_LEAVES: Final[Mapping[str, str]] = {"kernel": "weight", "embeddings": "weight", "gamma": "weight", "beta": "bias"}
