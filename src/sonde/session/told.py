"""`sonde.batch`: which batch comes next, as far as the user tells. Works with torch tensors and with numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.reduce.identity import batch_hash, ids_hash, label_purity
from sonde.session.custom import put_sketches

if TYPE_CHECKING:
    from sonde.session.session import Session


def put_batch(session: Session, inputs: Any, targets: Any, ids: Any) -> None:
    """Begin the step if the one before is over; log the batch's identity; sketch its tensors."""
    session.forward_seen()
    values = [*_arrays(inputs), *_arrays(targets)]
    labels = _arrays(targets)
    purity = label_purity(labels[0]) if len(labels) == 1 else None
    found = {"hash": batch_hash(values), "ids_hash": ids_hash(ids), "label_purity": purity}
    session.log({f"data/batch/{stat}": value for stat, value in found.items() if value is not None})
    put_sketches(session, [(f"batch.{number}", value) for number, value in enumerate(values)])
    if session.data is not None:
        session.data.given(inputs, targets, is_purity_known=purity is not None)


def _arrays(value: Any) -> list[Any]:
    """The tensors or arrays in it; a plain number or a list of numbers is one."""
    if value is None:
        return []
    if hasattr(value, "detach") or isinstance(value, np.ndarray):
        return [value]
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(items, list | tuple) and any(hasattr(item, "shape") for item in items):
        return [array for item in items for array in _arrays(item)]
    return [np.asarray(items)]
