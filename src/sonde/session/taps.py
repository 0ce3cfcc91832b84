"""Sketches of tensors that the user passes to `tap` and `batch`. Works with torch tensors and with numpy arrays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.schema.names import site_name
from sonde.schema.records import Site, StatsRecord
from sonde.session.numbers import NotANumberError, numeric_array
from sonde.session.recording import Recording

if TYPE_CHECKING:
    from sonde.session.training.thread import TrainingThread


def readable(recording: Recording, name: str, value: Any) -> Any:
    """A readable tensor or array of numbers; None, and one warning, for anything else."""
    try:
        return _whole(value) if hasattr(value, "detach") else numeric_array(value)
    except Exception as error:  # noqa: BLE001 - reading a user's value may fail in any way
        why = str(error) if isinstance(error, NotANumberError) else f"{type(error).__name__}: {error}"
        recording.warn_once(f"tap {name}", f'"{name}" is not recorded: {why[:300]}.')
        return None


def _whole(tensor: Any) -> Any:
    from sonde.reduce.dense import UnreadableError, dense, whole

    try:
        found = whole(tensor).detach()
        return dense(found)[0] if found.is_nested or found.is_meta else found
    except UnreadableError as why:
        raise NotANumberError(str(why)) from None


def put_sketches(recording: Recording, training: TrainingThread, named: list[tuple[str, Any]]) -> None:
    """Sketch each tensor or array that can be read now, and pass it to the writer."""
    values = [(name, readable(recording, name, value)) for name, value in named]
    arrays = [(name, value) for name, value in values if isinstance(value, np.ndarray)]
    tensors = [(name, value) for name, value in values if value is not None and not isinstance(value, np.ndarray)]
    if tensors:
        _put_tensors(recording, training, tensors)
    for name, value in arrays:
        _put_array(recording, training, name, value)


def _site_id(recording: Recording, name: str, shape: tuple[int, ...], dtype: str) -> int:
    return recording.writer.site_id(Site(kind="custom", name=site_name(name), shape=shape, dtype=dtype))


def _put_tensors(recording: Recording, training: TrainingThread, named: list[tuple[str, Any]]) -> None:
    from sonde.probe.guards import quiet
    from sonde.reduce.torch import Reducer
    from sonde.session.model.tables import put_tables

    names: dict[int, str] = {}

    def tell(key: int, why: str) -> None:
        recording.warn_once(f"tap {names[key]}", f'"{names[key]}" is not recorded: unsupported tensor ({why}).')

    reducer = Reducer(hist_samples=recording.settings.hist_samples, on_unreadable=tell)
    with quiet():
        for name, tensor in named:
            dtype = str(tensor.dtype).removeprefix("torch.")
            key = _site_id(recording, name, tuple(tensor.shape), dtype)
            names[key] = name
            reducer.add(key, tensor, histogram=True)
        tables = reducer.take()
    put_tables(training.step_writer, tables, training.steps.number)


def _put_array(recording: Recording, training: TrainingThread, name: str, array: np.ndarray[Any, Any]) -> None:
    from sonde.reduce.numpy import sketch

    found = sketch(array)
    key = _site_id(recording, name, array.shape, str(array.dtype))
    record = StatsRecord(
        training.steps.number,
        time.time(),
        np.array([key], np.int32),
        found.rows[None],
        np.zeros(1, np.int32),
        found.hist[None].astype(np.float32),
    )
    training.step_writer.put(record, 1024, step=training.steps.number)
