"""Snapshots in this process's memory: for tests, and for going back a few steps. Nothing outlives the process."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from sonde.errors import RunError, UnknownNameError, UsageError
from sonde.schema.snapshots.tensors import HostTensor, Receipt, Snapshot, SnapshotKey


class MemoryStore:
    """A dictionary of copies."""

    def __init__(self) -> None:
        self._snapshots: dict[SnapshotKey, Snapshot] = {}

    def write(self, snapshot: Snapshot) -> Receipt:
        if snapshot.key in self._snapshots:
            raise UsageError(f"{snapshot.key} is already in the store. Delete it first.")
        tensors = {
            name: HostTensor(tensor.flat().copy(), tensor.dtype, tensor.shape)
            for name, tensor in snapshot.tensors.items()
        }
        kept = replace(snapshot, tensors=tensors)
        self._snapshots[kept.key] = kept
        return Receipt(
            step=kept.step,
            nbytes=kept.nbytes,
            stored_bytes=kept.nbytes,
            num_tensors=len(tensors),
            sha256=hashlib.sha256(_document(kept)).hexdigest(),
        )

    def attempts(self) -> list[int]:
        return sorted({key.attempt for key in self._snapshots})

    def steps(self, attempt: int = 0) -> list[int]:
        return sorted(key.step for key in self._snapshots if key.attempt == attempt)

    def read(self, step: int, names: Iterable[str] | None = None, *, attempt: int = 0) -> Snapshot:
        kept = self._find(SnapshotKey(attempt, step))
        wanted = kept.tensors if names is None else list(names)
        for name in wanted:
            if name not in kept.tensors:
                raise UnknownNameError(f"tensor at step {step}", name, kept.tensors)
        return replace(kept, tensors={name: kept.tensors[name] for name in wanted})

    def delete(self, step: int, *, attempt: int = 0) -> None:
        del self._snapshots[self._find(SnapshotKey(attempt, step)).key]

    def close(self) -> None:
        """Snapshots stay readable until the store is released."""

    def _find(self, key: SnapshotKey) -> Snapshot:
        if key not in self._snapshots:
            raise RunError(f"no snapshot of {key}. Available: {self.steps(key.attempt)}.")
        return self._snapshots[key]


def open(run: Path, *, rank: int = 0) -> MemoryStore:
    """An empty store; the run's folder is not touched."""
    return MemoryStore()


def _document(snapshot: Snapshot) -> bytes:
    sums = {name: zlib.crc32(tensor.flat().tobytes()) for name, tensor in snapshot.tensors.items()}
    return json.dumps(sums, sort_keys=True).encode()
