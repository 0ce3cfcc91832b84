"""Snapshots in this process's memory: for tests, and for looking back a few steps. Nothing outlives the process."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from sonde.errors import RunError, UnknownNameError, UsageError
from sonde.schema.tensors import HostTensor, Receipt, Snapshot


class MemoryStore:
    """A dictionary of copies."""

    def __init__(self) -> None:
        self._snapshots: dict[int, Snapshot] = {}

    def write(self, snapshot: Snapshot) -> Receipt:
        if snapshot.step in self._snapshots:
            raise UsageError(f"step {snapshot.step} is in the store already. Delete it first.")
        tensors = {
            name: HostTensor(tensor.flat().copy(), tensor.dtype, tensor.shape)
            for name, tensor in snapshot.tensors.items()
        }
        kept = Snapshot(snapshot.step, snapshot.time, snapshot.reason, tensors)
        self._snapshots[snapshot.step] = kept
        return Receipt(
            step=kept.step,
            nbytes=kept.nbytes,
            stored_bytes=kept.nbytes,
            num_tensors=len(tensors),
            sha256=hashlib.sha256(_document(kept)).hexdigest(),
        )

    def steps(self) -> list[int]:
        return sorted(self._snapshots)

    def read(self, step: int, names: Iterable[str] | None = None) -> Snapshot:
        kept = self._find(step)
        wanted = kept.tensors if names is None else list(names)
        for name in wanted:
            if name not in kept.tensors:
                raise UnknownNameError(f"tensor at step {step}", name, kept.tensors)
        return Snapshot(kept.step, kept.time, kept.reason, {name: kept.tensors[name] for name in wanted})

    def delete(self, step: int) -> None:
        self._find(step)
        del self._snapshots[step]

    def close(self) -> None:
        """What was kept stays readable until the store is forgotten."""

    def _find(self, step: int) -> Snapshot:
        if step not in self._snapshots:
            raise RunError(f"no snapshot of step {step}. There are: {self.steps()}.")
        return self._snapshots[step]


def open(run: Path, *, rank: int = 0) -> MemoryStore:
    """An empty store; the run's folder is not touched."""
    return MemoryStore()


def _document(snapshot: Snapshot) -> bytes:
    sums = {name: zlib.crc32(tensor.flat().tobytes()) for name, tensor in snapshot.tensors.items()}
    return json.dumps(sums, sort_keys=True).encode()
