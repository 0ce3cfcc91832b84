"""`sonde.batch`: which batch comes next, as far as the user tells. Works with torch tensors and with numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.reduce.inspect.identity import batch_hash, ids_hash, label_purity
from sonde.session.taps import put_sketches, readable

if TYPE_CHECKING:
    from sonde.session.session import Session


def put_batch(session: Session, inputs: Any, targets: Any, ids: Any) -> None:
    """Begin the step if the one before is over; log the batch's identity; sketch its tensors."""
    session.threads.begins().steps.begin_next()
    if session.data is not None and not session.data.is_here:
        session.warn_once(
            "batch of another thread",
            "sonde.batch() records the batches of the thread that trains the first watched model; those of other "
            "threads are not recorded.",
        )
        return
    parts, labels = _parts(inputs), _parts(targets)
    named = {f"batch.{number}": value for number, value in enumerate([*parts, *labels])}
    read = {name: readable(session, name, value) for name, value in named.items()}
    values = {name: value for name, value in read.items() if value is not None}
    label = values.get(f"batch.{len(parts)}") if len(labels) == 1 else None
    purity = None if label is None else label_purity(label)
    found = {"hash": batch_hash(list(values.values())), "ids_hash": _ids_hash(session, ids), "label_purity": purity}
    session.log({f"data/batch/{stat}": value for stat, value in found.items() if value is not None})
    put_sketches(session, list(values.items()))
    if session.data is not None:
        session.data.given(inputs, targets, is_purity_known=purity is not None)


def _ids_hash(session: Session, ids: Any) -> Any:
    why = "an iterator can be read only once, and that is for your loop. Give a list"
    try:
        if not isinstance(ids, Iterator):
            return ids_hash(ids if not hasattr(ids, "detach") else readable(session, "batch ids", ids))
    except Exception as error:  # noqa: BLE001 - what is in the ids is the user's
        why = f"{type(error).__name__}: {error}"
    session.warn_once("batch ids", f"the ids of sonde.batch() are not recorded: {why[:300]}.")
    return None


def _parts(value: Any) -> list[Any]:
    """The tensors or arrays in it; a plain number or a list of numbers is one."""
    if value is None:
        return []
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        return [value]
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(items, list | tuple) and any(hasattr(item, "shape") for item in items):
        return [part for item in items for part in _parts(item)]
    return [items]
