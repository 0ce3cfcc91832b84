"""The metrics of a monitor: values by step and key, combined over micro-batches, saved as HDF5 and read back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from sonde.flow.fetch import fetch
from sonde.schema.snapshots.exported import require_h5py

Aggregation = Callable[[Tensor], Any]
STEP: Final = ":step"
VALUE: Final = ":value"
_FLOAT_BYTES: Final = sys.getsizeof(0.0)


class MetricStore:
    """Tensors accumulate during a step and become one number each at its end."""

    def __init__(self) -> None:
        self._open: dict[str, list[Tensor]] = {}
        self._aggregations: dict[str, Aggregation] = {}
        self.steps: dict[int, dict[str, float]] = {}
        self.nbytes = 0
        """Memory of the finished steps; keys are shared among them."""
        self._known_keys: set[str] = set()

    def add(self, key: str, value: Any, aggregation: Aggregation | None = None) -> None:
        """Add a number or a tensor of numbers; a tensor stays on its device until the step ends."""
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        self._open.setdefault(key, []).append(tensor.reshape(-1).float())
        if aggregation is not None:
            self._aggregations[key] = aggregation

    def close(self, step: int, on_error: Callable[[str, Exception], None]) -> dict[str, float]:
        """Combine the values of the micro-batches: by the mean, or by the metric's own aggregation. Waits for a device
        once."""
        joined: dict[str, Tensor] = {}
        for key, parts in self._open.items():
            try:
                joined[key] = self._joined(key, parts)
            except Exception as error:  # noqa: BLE001 - a user's metric that fails is reported, and the others stay
                on_error(key, error)
        self.discard()
        self._put(step, {key: number for key, (number,) in zip(joined, fetch([*joined.values()]), strict=True)})
        return self.steps[step]

    def put(self, step: int, key: str, value: Any) -> None:
        """Add a finished number; it replaces an earlier one of the same name."""
        self._put(step, {key: float(value)})

    def _put(self, step: int, numbers: dict[str, float]) -> None:
        values = self.steps.setdefault(step, {})
        before = sys.getsizeof(values) if values else 0
        num_before = len(values)
        values |= numbers
        new = numbers.keys() - self._known_keys
        self._known_keys |= new
        self.nbytes += sys.getsizeof(values) - before + sum(map(sys.getsizeof, new))
        self.nbytes += (len(values) - num_before) * _FLOAT_BYTES

    def _joined(self, key: str, parts: list[Tensor]) -> Tensor:
        together = torch.cat([part.to(parts[0].device) for part in parts])
        value = self._aggregations.get(key, torch.mean)(together)
        if not isinstance(value, Tensor):
            return torch.tensor(float(value), dtype=torch.float64)
        if value.numel() != 1:
            raise ValueError(f"an aggregation must return one number; this one returned {value.numel()}")
        return value

    def discard(self) -> None:
        self._open.clear()
        self._aggregations.clear()


def save_hdf5(path: str | Path, steps: dict[int, dict[str, float]]) -> Path:
    """For each key a group with its steps and values; slashes in keys become nested groups."""
    h5py = require_h5py()
    columns: dict[str, tuple[list[int], list[float]]] = {}
    for step, values in sorted(steps.items()):
        for key, value in values.items():
            column = columns.setdefault(key, ([], []))
            column[0].append(step)
            column[1].append(value)
    with h5py.File(path, "w") as file:
        for key, (numbers, column_values) in columns.items():
            group = file.require_group("/".join(map(_part, key.split("/"))))
            group.attrs["key"] = key
            group.create_dataset(STEP, data=np.array(numbers, np.int64))
            group.create_dataset(VALUE, data=np.array(column_values, np.float64))
    return Path(path)


def _part(name: str) -> str:
    """A part of a key as a name in a path, where "" and "." mean "here"."""
    return quote(name, safe=" []()^+-=,:;@") if name.strip(".") else f"%{name}"


def load_hdf5(path: str | Path) -> dict[int, dict[str, float]]:
    """Read a file written by `save_hdf5`."""
    h5py = require_h5py()
    steps: dict[int, dict[str, float]] = {}

    def visit(_: str, item: Any) -> None:
        if isinstance(item, h5py.Group) and "key" in item.attrs:
            for step, value in zip(item[STEP][()], item[VALUE][()], strict=True):
                steps.setdefault(int(step), {})[str(item.attrs["key"])] = float(value)

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return steps
