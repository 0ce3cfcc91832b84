"""Whole tensors: the list of snapshots, the contents of one, and one tensor as an image with its spectrum."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from sonde.errors import MissingPackageError, RunError
from sonde.run import Run, SnapshotView
from sonde.schema.snapshots.document import TensorEntry
from sonde.show.term.number import counted
from sonde.show.web.query import MAX_STEP, NotFoundError, Query
from sonde.show.web.tensor_image import image_of
from sonde.show.web.wire import Reply, binary_reply, json_reply, number

MAX_SNAPSHOTS: Final = 2_000
MAX_ELEMENTS: Final = 1 << 30


def snapshots(run: Run, query: Query) -> Reply:
    query.only()
    rows: list[dict[str, Any]] = []
    problem = ""
    try:
        store = run.tensors.store(local=True)
        for step in store.steps[-MAX_SNAPSHOTS:]:
            document = store.document(step)
            rows.append(
                {
                    "step": step,
                    "time": document.time,
                    "reason": document.reason,
                    "nbytes": document.nbytes,
                    "num_tensors": len(document.tensors),
                    "attempt": store.attempt(step),
                }
            )
    except (RunError, MissingPackageError) as error:
        problem = str(error)
    return json_reply({"snapshots": rows, "problem": problem})


def snapshot(run: Run, step: int, query: Query) -> Reply:
    query.only()
    known = {f"{site.kind}/{site.name}": i for i, site in run.catalog.sites.items()}
    rows = []
    for n, (name, entry) in enumerate(_entries(run.tensors.store(local=True), step)):
        kind, _, site = name.partition("/")
        row = {"n": n, "name": name, "kind": kind, "site": site, "shape": list(entry.shape), "dtype": entry.dtype}
        rows.append({**row, "i": known.get(name)})
    return json_reply({"tensors": rows})


def _entries(store: SnapshotView, step: int) -> list[tuple[str, TensorEntry]]:
    if not 0 <= step <= MAX_STEP or step not in store.steps:
        raise NotFoundError(f"no snapshot of step {step}")
    return sorted(store.entries(step).items())


def image(run: Run, step: int, n: int, query: Query) -> Reply:
    query.only()
    store = run.tensors.store(local=True)
    entries = _entries(store, step)
    if not 0 <= n < len(entries):
        raise NotFoundError(f"the snapshot of step {step} has only {counted(len(entries), 'tensor')}")
    name, entry = entries[n]
    if math.prod(entry.shape) > MAX_ELEMENTS or entry.dtype.startswith("complex"):
        raise NotFoundError(f"{name} ({entry.dtype}, {math.prod(entry.shape):,} elements) cannot be drawn")
    rows, columns = as_matrix_shape(entry.shape)

    def read(begin: int, end: int) -> Any:
        if len(entry.shape) < 2:
            return store.read(step, name)
        return store.read_part(step, name, slice(begin, end))

    made = image_of(read, rows, columns)
    values, sampled = made.spectrum()
    header = {
        "step": step,
        "n": n,
        "name": name,
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "matrix": [rows, columns],
        "height": made.pixels.shape[0],
        "width": made.pixels.shape[1],
        "min": number(made.low) if made.num_finite else None,
        "max": number(made.high) if made.num_finite else None,
        "rms": number(made.rms),
        "num_nan": made.num_nan,
        "num_inf": made.num_inf,
        "spectrum_of": list(sampled),
        "stable_rank": float(np.square(values).sum() / values[0] ** 2) if len(values) and values[0] > 0 else None,
    }
    return binary_reply(header, {"pixels": ("f32", made.pixels), "spectrum": ("f64", values)})


def as_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape as a matrix: the first axis by the rest; a vector is one row.

    >>> as_matrix_shape((8, 4, 3, 3)), as_matrix_shape((5,)), as_matrix_shape(())
    ((8, 36), (1, 5), (1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])
