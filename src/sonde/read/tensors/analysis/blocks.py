"""The tensors and steps of a query, and the blocks of rows in which they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final
from uuid import uuid4

import numpy as np

from sonde.errors import UsageError, nearest
from sonde.read.run.steps import Steps, parse_steps
from sonde.read.tensors.readers import TensorStore
from sonde.read.tensors.stores import open_tensor_store
from sonde.schema.names import matches_any
from sonde.schema.snapshots.tensors import AnyArray, storage_dtype

BLOCK: Final = 8 << 20
"""Stored bytes of one block; a task needs a few times that in memory, in float64."""
Rows = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Tracked:
    """One tensor and the steps of its snapshots."""

    name: str
    steps: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def site(self) -> str:
        return self.name.partition("/")[2]

    def blocks(self, size: int = BLOCK) -> list[Rows]:
        """Rows (first, stop) of about `size` bytes; None for a tensor that is read at once."""
        shape = self.shapes[0]
        if len(set(self.shapes)) > 1 or not shape:
            return [None]
        row = max(math.prod(shape[1:]) * storage_dtype(self.dtype).itemsize, 1)
        rows = max(1, size // row)
        return [(first, min(first + rows, shape[0])) for first in range(0, max(shape[0], 1), rows)]


def track(store: TensorStore, pattern: str | Sequence[str], steps: Steps = None) -> list[Tracked]:
    """The tensors that match globs, in the order of their first snapshot."""
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    every = store.steps
    if not every:
        raise UsageError("the run has no snapshots. Take some:  sonde.watch(model, snapshots=sonde.every(500))")
    wanted = parse_steps(steps, every[-1]).mask(np.array(every, np.int64))
    found: dict[str, list[tuple[int, tuple[int, ...], str]]] = {}
    known: dict[str, None] = {}
    for step in (step for step, is_wanted in zip(every, wanted, strict=True) if is_wanted):
        for name, entry in store.entries(step).items():
            known[name] = None
            if matches_any(patterns, name):
                found.setdefault(name, []).append((step, entry.shape, entry.dtype))
    if not found:
        raise UsageError(_nothing(patterns, list(known)))
    return [
        Tracked(name, tuple(s for s, _, _ in kept), tuple(shape for _, shape, _ in kept), kept[0][2])
        for name, kept in found.items()
    ]


def _nothing(patterns: Sequence[str], known: Sequence[str]) -> str:
    asked = ", ".join(f'"{pattern}"' for pattern in patterns)
    if not known:
        return "no snapshot at the requested steps. run.tensors.snapshots() lists all snapshots."
    shown = ", ".join(known[:4])
    more = f" and {len(known) - 4} more" if len(known) > 4 else ""
    return f"no tensor matches {asked}.{nearest(patterns[0], known)} The snapshots contain {shown}{more}."


@dataclass(frozen=True, slots=True)
class BlockRef:
    """The location of the tensors of a query, from which a worker in another process opens them."""

    run: str
    version: tuple[tuple[str, str], ...] = ()
    """A branch, tag or commit, if the run has one."""
    attempt: int | None = None
    """The selected attempt; None for the last."""
    question: str = field(default_factory=lambda: uuid4().hex)
    """Open a store again for each query: a running run may have new snapshots."""


@lru_cache(maxsize=8)
def store_at(place: BlockRef) -> TensorStore:
    """The store of a query, opened once per process."""
    at = dict(place.version)
    return open_tensor_store(
        Path(place.run), attempt=place.attempt, branch=at.get("branch"), tag=at.get("tag"), commit=at.get("commit")
    )


def read_block(place: BlockRef, step: int, name: str, rows: Rows) -> AnyArray:
    store = store_at(place)
    return store.read(step, name) if rows is None else store.read_part(step, name, slice(*rows))
