"""`sonde.batch`: records the batch that the user passes. Works with torch tensors and with numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.reduce.inspect.identity import batch_hash, ids_hash, label_purity
from sonde.session.process.threads import TrainingThreads
from sonde.session.recording import Recording
from sonde.session.scalars import log_values
from sonde.session.taps import put_sketches, readable

if TYPE_CHECKING:
    from sonde.session.data.inspection import DataInspection


def put_batch(
    recording: Recording, threads: TrainingThreads, data: DataInspection | None, inputs: Any, targets: Any, ids: Any
) -> None:
    """Start a new step if the previous one is over, log the batch's identity, and sketch its tensors."""
    threads.begins().steps.begin_next()
    if data is not None and not data.is_here:
        recording.warn_once(
            "batch of another thread",
            "sonde.batch() only records batches from the thread that trains the first watched model; batches from "
            "other threads are not recorded.",
        )
        return
    parts, labels = _parts(inputs), _parts(targets)
    named = {f"batch.{number}": value for number, value in enumerate([*parts, *labels])}
    read = {name: readable(recording, name, value) for name, value in named.items()}
    values = {name: value for name, value in read.items() if value is not None}
    label = values.get(f"batch.{len(parts)}") if len(labels) == 1 else None
    purity = None if label is None else label_purity(label)
    found = {"hash": batch_hash(list(values.values())), "ids_hash": _ids_hash(recording, ids), "label_purity": purity}
    log_values(
        recording, threads.current, {f"data/batch/{stat}": value for stat, value in found.items() if value is not None}
    )
    put_sketches(recording, threads.current, list(values.items()))
    if data is not None:
        data.given(inputs, targets, is_purity_known=purity is not None)


def _ids_hash(recording: Recording, ids: Any) -> Any:
    why = "an iterator can be read only once, and your loop needs it. Pass a list"
    try:
        if not isinstance(ids, Iterator):
            return ids_hash(ids if not hasattr(ids, "detach") else readable(recording, "batch ids", ids))
    except Exception as error:  # noqa: BLE001 - the ids are user data and may fail in any way
        why = f"{type(error).__name__}: {error}"
    recording.warn_once("batch ids", f"the ids of sonde.batch() are not recorded: {why[:300]}.")
    return None


def _parts(value: Any) -> list[Any]:
    """The tensors or arrays in a value; a plain number or a list of numbers counts as one array."""
    if value is None:
        return []
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        return [value]
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(items, list | tuple) and any(hasattr(item, "shape") for item in items):
        return [part for item in items for part in _parts(item)]
    return [items]
