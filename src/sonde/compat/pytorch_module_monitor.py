"""The names of pytorch-module-monitor: the monitor is `sonde.flow.ModuleMonitor`, which does what the tool documents.

`StorageManager` and `HooksManager`, which the monitor used inside, are here for programs that use them alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sonde.compat.hooks import HookList
from sonde.display import warn
from sonde.flow import ModuleMonitor, MonitorMixin, RefinedCoordinateCheck, monitor_scaled_dot_product_attention
from sonde.flow.monitor.metric_store import Aggregation, MetricStore, load_hdf5, save_hdf5

__all__ = [
    "HooksManager",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "StorageManager",
    "monitor_scaled_dot_product_attention",
]

HooksManager = HookList


class StorageManager:
    """Metrics by step: `{step: {key: value}}`. Values of one key are combined when the step is aggregated.

    storage = StorageManager()
    storage.log_tensor(0, "norm", x.norm(dim=-1))
    storage.aggregate_step(0)
    storage.get_step_metrics(0)
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self.logger = logger
        self._finished = MetricStore()
        self._open: dict[int, MetricStore] = {}

    def log_scalar(self, step: int, key: str, value: float | Tensor, aggregation_fn: Aggregation | None = None) -> None:
        self._open.setdefault(step, MetricStore()).add(key, value, aggregation_fn)

    log_tensor: Callable[..., None] = log_scalar

    def aggregate_step(self, step: int) -> None:
        """Combine what was logged at this step: by the mean, or by the key's own function."""
        numbers = self._open.pop(step, MetricStore()).close(step, self._failed)
        for key, value in numbers.items():
            self._finished.put(step, key, value)
        if self.logger is not None:
            size = f"{self._finished.nbytes / 1e6:.2f} MB"
            self.logger.info("Logged %d keys at step %d. Size of all logged metrics: %s", len(numbers), step, size)

    def get_step_metrics(self, step: int) -> dict[str, float]:
        return dict(self._finished.steps.get(step, {}))

    def get_all_metrics(self) -> Mapping[int, Mapping[str, float]]:
        return self._finished.steps

    def save_hdf5(self, filename: str | Path) -> Path:
        return save_hdf5(filename, self._finished.steps)

    @staticmethod
    def load_hdf5(filename: str | Path) -> dict[int, dict[str, float]]:
        return load_hdf5(filename)

    def _failed(self, key: str, error: Exception) -> Any:
        warn(f"sonde: {key} could not be aggregated and is left out: {error!r}")
