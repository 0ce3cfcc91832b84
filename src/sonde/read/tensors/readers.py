"""The snapshots of a run by step, wherever they are stored, and a base for stores that cache the last few readers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from sonde.schema.snapshots.document import Index, SnapshotDocument, SnapshotReader, TensorEntry
from sonde.schema.snapshots.tensors import AnyArray

_NUM_READERS: Final = 256
"""Number of snapshot documents kept in memory."""


class TensorStore(ABC):
    """The snapshots of a run by step."""

    @property
    @abstractmethod
    def steps(self) -> list[int]:
        """The steps with a snapshot, in order."""

    @abstractmethod
    def reader(self, step: int) -> SnapshotReader:
        """The reader of a visible snapshot; raises RunError if there is none."""

    def document(self, step: int) -> SnapshotDocument:
        """The document of a snapshot, known without reading a tensor."""
        return self.reader(step).document

    def entries(self, step: int) -> dict[str, TensorEntry]:
        """The tensors of a snapshot, by name."""
        return dict(self.document(step).tensors)

    def read(self, step: int, name: str) -> AnyArray:
        """A tensor's values; bfloat16 and 8-bit floats use the dtypes of ml_dtypes."""
        return self.reader(step).values(name)

    def read_part(self, step: int, name: str, slices: Sequence[Index] | Index) -> AnyArray:
        """`read(step, name)[slices]`, reading only the required part of the first axis."""
        return self.reader(step).part(name, slices)

    def hidden(self, step: int) -> list[int]:
        """The attempts with a snapshot of this step, if none of them is visible."""
        return []


class CachingStore(TensorStore):
    """A store that opens snapshots itself."""

    def __init__(self) -> None:
        self._readers: OrderedDict[int, SnapshotReader] = OrderedDict()
        self._lock = threading.Lock()  # Dask reads from several threads

    def _kept(self, step: int, open: Callable[[], SnapshotReader]) -> SnapshotReader:
        """The cached reader of a step, or a new one."""
        with self._lock:
            reader = self._readers.get(step)
        if reader is None:
            reader = open()
            with self._lock:
                self._readers[step] = reader
                while len(self._readers) > _NUM_READERS:
                    self._readers.popitem(last=False)
        return reader

    def _forget(self) -> None:
        with self._lock:
            self._readers.clear()
