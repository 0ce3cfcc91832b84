"""Sketches of tensors the user hands over: `tap` and `batch`. Works with torch tensors and with numpy arrays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.schema.names import site_name
from sonde.schema.records import Site, StatsRecord

if TYPE_CHECKING:
    from sonde.session.session import Session


def put_sketches(session: Session, named: list[tuple[str, Any]]) -> None:
    """Sketch each tensor or array now and hand it to the writer."""
    arrays = [(name, value) for name, value in named if not hasattr(value, "detach")]
    tensors = [(name, value) for name, value in named if hasattr(value, "detach")]
    if tensors:
        _put_tensors(session, tensors)
    for name, value in arrays:
        _put_array(session, name, value)


def _site_id(session: Session, name: str, shape: tuple[int, ...], dtype: str) -> int:
    return session.writer.site_id(Site(kind="custom", name=site_name(name), shape=shape, dtype=dtype))


def _put_tensors(session: Session, named: list[tuple[str, Any]]) -> None:
    from sonde.probe.guards import quiet
    from sonde.reduce.torch import Reducer
    from sonde.session.put_tables import put_tables

    names: dict[int, str] = {}

    def tell(key: int, why: str) -> None:
        session.warn_once(f"tap {names[key]}", f'"{names[key]}" is not recorded: no sketch can be taken of {why}.')

    reducer = Reducer(hist_samples=session.settings.hist_samples, on_unreadable=tell)
    with quiet():
        for name, tensor in named:
            dtype = str(tensor.dtype).removeprefix("torch.")
            key = _site_id(session, name, tuple(tensor.shape), dtype)
            names[key] = name
            reducer.add(key, tensor, histogram=True)
        tables = reducer.take()
    step = session.step_number
    put_tables(session.writer, tables, step)


def _put_array(session: Session, name: str, value: Any) -> None:
    from sonde.reduce.numpy import sketch

    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        session.warn_once(f"tap {name}", f'"{name}" is not recorded: it holds {array.dtype}, not numbers.')
        return
    found = sketch(array)
    key = _site_id(session, name, array.shape, str(array.dtype))
    record = StatsRecord(
        session.step_number,
        time.time(),
        np.array([key], np.int32),
        found.rows[None],
        np.zeros(1, np.int32),
        found.hist[None].astype(np.float32),
    )
    session.writer.put(record, 1024, step=session.step_number)
