"""The suite for storages of checkpoints: ours pass, one in memory does, and each planted fault is found."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from sonde.testing import StorageBackendTests
from sonde.tune import Checkpoint, LocalStorage, StorageBackend

pytest.importorskip("safetensors")


class TestLocalStorage(StorageBackendTests):
    def open(self, folder: Path) -> StorageBackend:
        return LocalStorage(folder / "checkpoints")


class Memory(StorageBackend):
    """The shortest storage that works."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Checkpoint, Any]] = {}

    def save_checkpoint(self, checkpoint: Any, metadata: Any) -> Checkpoint:
        facts = (metadata["step"], metadata["time"], dict(metadata["metrics"]))
        entry = Checkpoint(Path(f"at-{metadata['step']:09}"), *facts, 0, dict(metadata["details"]))
        self.kept[entry.id] = entry, copy.deepcopy(checkpoint)
        return entry

    def load_checkpoint(self, checkpoint_id: str) -> Any:
        return copy.deepcopy(self.kept[checkpoint_id][1])

    def list_checkpoints(self) -> list[Checkpoint]:
        return [self.kept[id][0] for id in sorted(self.kept)]

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        del self.kept[checkpoint_id]


class TestMemory(StorageBackendTests):
    survives_reopening = False

    def open(self, folder: Path) -> StorageBackend:
        return Memory()


class KeepsNoCopy(Memory):
    def save_checkpoint(self, checkpoint: Any, metadata: Any) -> Checkpoint:
        entry = super().save_checkpoint(checkpoint, metadata)
        self.kept[entry.id] = entry, checkpoint
        return entry


class LosesTypes(Memory):
    def save_checkpoint(self, checkpoint: Any, metadata: Any) -> Checkpoint:
        entry = super().save_checkpoint(checkpoint, metadata)
        for tensors in self.kept[entry.id][1].tensors.values():
            tensors.update({name: tensor.float() for name, tensor in tensors.items()})
        return entry


class ListsAsSaved(Memory):
    def list_checkpoints(self) -> list[Checkpoint]:
        return [entry for entry, _ in self.kept.values()]


class Answers(Memory):
    def load_checkpoint(self, checkpoint_id: str) -> Any:
        return self.kept.get(checkpoint_id, (None, None))[1]


class DeletesAll(Memory):
    def delete_checkpoint(self, checkpoint_id: str) -> None:
        self.kept.clear()


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (KeepsNoCopy, "test_what_is_saved_is_a_copy"),
        (LosesTypes, "test_a_checkpoint_comes_back_bit_by_bit"),
        (ListsAsSaved, "test_checkpoints_are_listed_by_step_with_their_metrics"),
        (Answers, "test_a_checkpoint_that_does_not_exist_is_an_error"),
        (DeletesAll, "test_deleting_one_leaves_the_others"),
        (DeletesAll, "test_a_manager_saves_retains_and_restores"),
        (Memory, "test_opened_again_it_has_what_was_saved"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: type[Memory], test: str) -> None:
    broken = type("Broken", (StorageBackendTests,), {"open": lambda self, folder: fault()})()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(broken, test)(tmp_path)
