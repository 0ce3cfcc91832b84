"""Numbers that `log` was given: plain ones, and tensors that are still on a device and are not waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.schema.records import ScalarsRecord
from sonde.session.numbers import flattened, is_number

if TYPE_CHECKING:
    from sonde.session.session import Session


def put_logged(session: Session, values: Mapping[str, Any], step: int) -> None:
    """Hand them to the writer; what is no number is named once and left out."""
    names: list[str] = []
    numbers: list[float] = []
    tensors: list[tuple[int, Any]] = []
    for name, value in flattened(values):
        if hasattr(value, "detach") and getattr(value, "numel", lambda: 0)() == 1:
            tensors.append((len(names), value))
            value = np.nan
        elif not is_number(value):
            session.warn_once(
                f"log {name}", f'log() takes numbers; "{name}" is {type(value).__name__} and was left out.'
            )
            continue
        names.append(name)
        numbers.append(float(value))
    if names:
        _put(session, names, numbers, tensors, step)


def _put(session: Session, names: list[str], numbers: list[float], tensors: list[tuple[int, Any]], step: int) -> None:
    ids = np.array([session.writer.scalar_id(name) for name in names], np.int32)
    steps = np.full(len(names), step, np.int64)
    times = np.full(len(names), time.time())
    values = np.array(numbers)
    if not tensors:
        session.writer.put(ScalarsRecord(ids, steps, times, values), 32 * len(names), step=step)
        return
    from sonde.reduce.scalars import PendingScalars

    pending = PendingScalars([tensor for _, tensor in tensors])

    places = [place for place, _ in tensors]  # the tensors themselves are not kept

    def resolve() -> ScalarsRecord:
        values[places] = pending.resolve()
        return ScalarsRecord(ids, steps, times, values)

    session.writer.put(resolve, 64 * len(names), step=step, stream="scalars")
