"""The suite for stores finds each planted fault; that sonde's own stores pass it is tested next to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.schema.snapshots.tensors import HostTensor, Receipt, Snapshot, SnapshotKey
from sonde.testing import StoreTests
from sonde.write.tensors.stores.memory import MemoryStore


class KeepsNoCopy(MemoryStore):
    def write(self, snapshot: Snapshot) -> Receipt:
        receipt = super().write(snapshot)
        self._snapshots[snapshot.key] = snapshot
        return receipt


class Overwrites(MemoryStore):
    def write(self, snapshot: Snapshot) -> Receipt:
        self._snapshots.pop(snapshot.key, None)
        return super().write(snapshot)


class MixesAttempts(MemoryStore):
    def write(self, snapshot: Snapshot) -> Receipt:
        return super().write(replace(snapshot, attempt=0))


class ReadsEverything(MemoryStore):
    def read(self, step: int, names: Iterable[str] | None = None, *, attempt: int = 0) -> Snapshot:
        return super().read(step, attempt=attempt)


class DeletesLaterOnes(MemoryStore):
    def delete(self, step: int, *, attempt: int = 0) -> None:
        super().delete(step, attempt=attempt)
        self._snapshots.pop(SnapshotKey(attempt, step + 5), None)


class Rounds(MemoryStore):
    def read(self, step: int, names: Iterable[str] | None = None, *, attempt: int = 0) -> Snapshot:
        found = super().read(step, names, attempt=attempt)
        spoilt = {
            name: HostTensor(np.zeros_like(t.flat()).reshape(t.shape), t.dtype, t.shape) if t.dtype == "float16" else t
            for name, t in found.tensors.items()
        }
        return replace(found, tensors=spoilt)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (KeepsNoCopy, "test_what_is_written_is_a_copy"),
        (Overwrites, "test_a_step_is_written_once"),
        (MixesAttempts, "test_a_step_is_written_once_in_each_attempt"),
        (ReadsEverything, "test_one_tensor_is_read_without_the_others"),
        (DeletesLaterOnes, "test_deleting_one_leaves_the_others_readable"),
        (Rounds, "test_every_type_and_shape_comes_back_bit_by_bit"),
        (MemoryStore, "test_opened_again_it_has_what_was_written"),
        (MemoryStore, "test_a_second_writer_is_refused"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: type[MemoryStore], test: str) -> None:
    broken: Any = type("Broken", (StoreTests,), {"open": lambda self, run: fault()})()
    needs_run = test in ("test_opened_again_it_has_what_was_written", "test_a_second_writer_is_refused")
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, LookupError, RuntimeError)):
        getattr(broken, test)(tmp_path if needs_run else broken.open(tmp_path))
