"""Whole tensors of a run: one tensor over time, one snapshot as a mapping, a table of snapshots.

Everything is loaded lazily, and only the requested part is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from sonde.errors import MissingPackageError, UnknownNameError, UsageError
from sonde.read.run.catalog import read_snapshot_rows
from sonde.read.run.schemas import schema_of
from sonde.read.run.state import RunState
from sonde.read.run.steps import Steps, parse_steps
from sonde.read.tensors.lazy import LazyTensors, TensorSpec
from sonde.read.tensors.readers import TensorStore
from sonde.read.tensors.view import SnapshotView, is_shown
from sonde.schema.names import matches
from sonde.schema.snapshots.tensors import AnyArray, as_values, kind_of, storage_dtype

if TYPE_CHECKING:
    import xarray

LARGE: Final = 32 << 20
"""Size in bytes above which an array is split into Dask chunks, if Dask is installed; it is lazy either way."""
CHUNK: Final = 16 << 20
_SNAPSHOTS: Final = schema_of(
    "step:int64 time:double reason:string num_tensors:int64 bytes:int64 stored_bytes:int64 ratio:double attempt:int64"
)


def find_step(store: TensorStore, step: int | str) -> int:
    """Resolve a step: a number, "latest", or a negative index from the end."""
    steps = _some_steps(store)
    if step == "latest":
        return steps[-1]
    if not isinstance(step, int) or isinstance(step, bool):
        raise UsageError(f'invalid snapshot {step!r}. Give a step, a negative index or "latest".')
    if -len(steps) <= step < 0:
        return steps[step]
    if step not in steps:
        hidden = "".join(
            f" Another attempt has it: run.attempt({k}).tensors.snapshot({step})." for k in store.hidden(step)
        )
        raise UsageError(f"no snapshot of step {step}. {_nearest_steps(step, steps)}{hidden}")
    return step


def _some_steps(store: TensorStore) -> list[int]:
    steps = store.steps
    if not steps:
        raise UsageError("the run has no snapshots. Take some:  sonde.watch(model, snapshots=sonde.every(500))")
    return steps


def _nearest_steps(step: int, steps: Sequence[int]) -> str:
    if step < 0:
        return f"Number of snapshots: {len(steps)}, so -{len(steps)} is the first."
    nearest = min(steps, key=lambda known: abs(known - step))
    shown = [*map(str, steps[:4]), *(["…"] if len(steps) > 8 else []), *map(str, steps[max(4, len(steps) - 4) :])]
    return f"The closest is {nearest}. Snapshots exist at steps {', '.join(shown)}."


def snapshot_tensors(store: TensorStore, step: int | str, pattern: str = "*") -> LazyTensors:
    """The tensors of one snapshot by name, loaded lazily."""
    at = find_step(store, step)
    entries = {name: entry for name, entry in store.entries(at).items() if matches(pattern, name)}
    specs = {name: TensorSpec(entry.shape, entry.dtype) for name, entry in entries.items()}
    return LazyTensors(f"the snapshot of step {at}", specs, lambda name: store.read(at, name))


def num_snapshots(state: RunState) -> int:
    """Number of visible snapshots, according to the catalog."""
    rows = read_snapshot_rows(state.run, is_live=state.is_held)
    steps = {row.place.step for row in rows if is_shown(state.history, state.view, row.attempt, row.place.step)}
    return len(steps)


def snapshot_table(state: RunState, store: SnapshotView) -> pa.Table:
    """Table (step, time, reason, num_tensors, bytes, stored_bytes, ratio, attempt) of the snapshots.

    Only the catalog knows the size on disk; it is null if the row does not exist yet.
    """
    known = read_snapshot_rows(state.run, is_live=state.is_held)
    stored = {row.place: row.details.get("stored_bytes") for row in known}
    rows = []
    for step in store.steps:
        document = store.document(step)
        on_disk = size if isinstance(size := stored.get(store.place(step)), int) else None
        rows.append(
            {
                "step": step,
                "time": document.time,
                "reason": document.reason,
                "num_tensors": len(document.tensors),
                "bytes": document.nbytes,
                "stored_bytes": on_disk,
                "ratio": document.nbytes / on_disk if on_disk else None,
                "attempt": store.attempt(step),
            }
        )
    return pa.Table.from_pylist(rows, schema=_SNAPSHOTS)


def steps_of(store: TensorStore, name: str, steps: Steps = None) -> list[int]:
    """The steps with a snapshot of a tensor; the error for an unknown name suggests the closest match."""
    every = _some_steps(store)
    wanted = parse_steps(steps, every[-1]).mask(np.array(every, np.int64))
    found = [step for step, is_wanted in zip(every, wanted, strict=True) if is_wanted and name in store.entries(step)]
    if not found:
        known = {tensor for step in every for tensor in store.entries(step)}
        if name in known:
            raise UsageError(
                f'no snapshot of "{name}" at the requested steps. run.tensors.snapshots() lists all snapshots.'
            )
        if f"param/{name}" in known:  # the name in a state dict
            raise UsageError(f'no tensor "{name}": a name starts with its kind, e.g. "param/{name}".')
        raise UnknownNameError("tensor", name, known)
    return found


def tensor_over_steps(open: Callable[[], TensorStore], name: str, steps: Steps = None) -> xarray.DataArray:
    """One tensor over the snapshots that contain it, with dims (step, d0, d1, …), loaded lazily.

    `open` opens the store; it travels with the array to other processes, where workers of a cluster call it again.
    """
    store = open()
    found = steps_of(store, name, steps)
    entries = [store.entries(step)[name] for step in found]
    shapes = {entry.shape for entry in entries}
    if len(shapes) > 1:
        raise UsageError(
            f'"{name}" has {len(shapes)} different shapes in its {len(found)} snapshots, for example '
            f"{' and '.join(str(list(shape)) for shape in sorted(shapes)[:2])}, so they do not fit in one array. "
            "Select steps with steps=, or read one snapshot with run.tensors.snapshot(step)."
        )
    dtype = _dtype(entries[-1].dtype if len({entry.dtype for entry in entries}) == 1 else "float64")
    return _data_array(_Backing(open, store, name, found, entries[0].shape, dtype), entries[-1].dtype)


def _dtype(name: str) -> np.dtype[Any]:
    return as_values(np.empty(0, storage_dtype(name)), name).dtype


class _Backing:
    """The array behind xarray, whose values are not in memory."""

    def __init__(
        self,
        open: Callable[[], TensorStore],
        store: TensorStore | None,
        name: str,
        steps: list[int],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._open, self._store, self.name, self.steps, self.dtype = open, store, name, steps, dtype
        self.shape = (len(steps), *shape)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the open store, whose locks and files belong to this process."""
        return _Backing, (self._open, None, self.name, self.steps, self.shape[1:], self.dtype)

    @property
    def store(self) -> TensorStore:
        if self._store is None:
            self._store = self._open()
        return self._store

    def read(self, key: tuple[int | slice, ...]) -> AnyArray:
        """Read by integers and slices, one per axis; of each step only the required part is read."""
        first, *rest = key
        if isinstance(first, int | np.integer):
            return self._part(self.steps[int(first)], rest)
        parts = [self._part(step, rest) for step in self.steps[first]]
        if parts:
            return np.stack(parts)
        shape = [
            len(range(*index.indices(n)))
            for index, n in zip(rest, self.shape[1:], strict=True)
            if isinstance(index, slice)
        ]
        return np.empty((0, *shape), self.dtype)

    def _part(self, step: int, rest: Sequence[int | slice]) -> AnyArray:
        return self.store.read_part(step, self.name, tuple(rest)).astype(self.dtype, copy=False)


def _data_array(backing: _Backing, dtype: str) -> xarray.DataArray:
    try:
        import xarray
        from xarray.backends import BackendArray
        from xarray.core import indexing
    except ImportError:
        raise MissingPackageError("xarray", "tensors", "reading tensors over time") from None

    class Lazy(BackendArray):
        shape = backing.shape
        dtype = backing.dtype

        def __getitem__(self, key: Any) -> Any:
            support = indexing.IndexingSupport.BASIC
            return indexing.explicit_indexing_adapter(key, self.shape, support, backing.read)

    dims = ("step", *(f"d{axis}" for axis in range(len(backing.shape) - 1)))
    kind, _, site = backing.name.partition("/")
    attributes = {"kind": kind_of(backing.name), "site": site or kind, "dtype": dtype, "units": "1"}
    steps = xarray.Variable(("step",), np.array(backing.steps, np.int64), {"units": "optimizer steps"})
    lazy = xarray.Variable(dims, indexing.LazilyIndexedArray(Lazy()), attributes)
    array = xarray.DataArray(lazy, coords={"step": steps}, name=backing.name)
    size = int(np.prod(backing.shape)) * backing.dtype.itemsize
    if size <= LARGE or importlib.util.find_spec("dask") is None:
        return array
    return array.chunk(_chunks(backing.shape, backing.dtype.itemsize))


def _chunks(shape: tuple[int, ...], itemsize: int) -> dict[str, int]:
    """Chunk sizes: one step, and as many rows as the store reads at once."""
    row = int(np.prod(shape[2:])) * itemsize
    rows = {"d0": max(1, min(shape[1], CHUNK // max(row, 1)))} if len(shape) > 1 else {}
    return {"step": 1, **rows}
