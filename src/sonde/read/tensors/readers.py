"""A store that reads each snapshot by a `SnapshotReader`, and keeps the readers of the last few. Knows no place."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sonde.schema.snapshots.document import Index, SnapshotDocument, SnapshotReader, TensorEntry
from sonde.schema.snapshots.tensors import AnyArray

_NUM_READERS: Final = 256
"""Documents of snapshots that are kept in memory."""


class TensorStore(Protocol):
    """The snapshots of a run by step, wherever they are kept."""

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a snapshot, in order."""
        ...

    def document(self, step: int) -> SnapshotDocument:
        """What is known of a snapshot without reading a tensor."""
        ...

    def entries(self, step: int) -> dict[str, TensorEntry]:
        """The tensors of a snapshot, by name."""
        ...

    def read(self, step: int, name: str) -> AnyArray:
        """A tensor's values; bfloat16 and 8-bit floats have ml_dtypes' types."""
        ...

    def read_part(self, step: int, name: str, slices: Sequence[Index] | Index) -> AnyArray:
        """`read(step, name)[slices]`, reading only what lies along the first axis."""
        ...

    def hidden(self, step: int) -> list[int]:
        """The attempts that have a snapshot of this step, if none of them is shown."""
        ...


class SnapshotReaders(ABC):
    """What all stores answer alike, once they have found a snapshot."""

    def __init__(self) -> None:
        self._readers: OrderedDict[int, SnapshotReader] = OrderedDict()
        self._lock = threading.Lock()  # Dask reads by several threads

    @abstractmethod
    def _visible(self, step: int) -> SnapshotReader:
        """The reader of a snapshot that is there for users to see; a RunError where there is none."""

    def document(self, step: int) -> SnapshotDocument:
        return self._visible(step).document

    def entries(self, step: int) -> dict[str, TensorEntry]:
        return dict(self._visible(step).document.tensors)

    def read(self, step: int, name: str) -> AnyArray:
        return self._visible(step).values(name)

    def read_part(self, step: int, name: str, slices: Sequence[Index] | Index) -> AnyArray:
        return self._visible(step).part(name, slices)

    def hidden(self, step: int) -> list[int]:
        return []

    def _kept(self, step: int, open: Callable[[], SnapshotReader]) -> SnapshotReader:
        """The reader of a step, opened if it is not known yet."""
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
