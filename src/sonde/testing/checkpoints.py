"""The test suite for storages of checkpoints. To test a new one, write one class that says how it is opened.

class TestMyStorage(StorageBackendTests):
    def open(self, folder):
        return MyStorage(folder)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sonde.tune.checkpoint.manager import CheckpointManager
from sonde.tune.checkpoint.storage import Payload, StorageBackend

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def payload(step: int = 0) -> Payload:
    """Every type and awkward shape, with NaN, in two files, and a state with every kind of plain value."""
    generator = torch.Generator().manual_seed(step)
    tensors: dict[str, Tensor] = {
        f"layers.0.{str(dtype).removeprefix('torch.')}": torch.randint(0, 2, (3, 4), generator=generator).to(dtype)
        for dtype in DTYPES
    }
    tensors["layers.1.weight"] = torch.randn(5, 2, generator=generator)
    tensors["layers.1.nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    tensors["scalar"], tensors["empty"] = torch.tensor(1.5), torch.zeros(0, 3)
    state = {"step": step, "nested": {"list": [1, 2.5, "ä", None, True], "empty": {}}, "ratio": 0.1}
    return Payload({"model": tensors, "optimizer": {"layers.1.weight.exp_avg": torch.ones(5, 2)}}, state)


def metadata(step: int, **metrics: float) -> dict[str, Any]:
    """The metadata that a manager passes to `save_checkpoint`."""
    return {"step": step, "time": 100.0 + step, "metrics": metrics, "details": {"reason": ""}}


def assert_same(found: Payload, saved: Payload) -> None:
    """Equal in every bit."""
    assert found.state == saved.state
    assert {name: set(file) for name, file in found.tensors.items()} == {
        name: set(file) for name, file in saved.tensors.items()
    }
    for file, tensors in saved.tensors.items():
        for name, tensor in tensors.items():
            other = found.tensors[file][name]
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
            assert _bits(other) == _bits(tensor), name


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


class StorageBackendTests:
    """Subclass it, and say how the storage is opened."""

    survives_reopening: ClassVar[bool] = True
    """Whether a storage that is opened again on the same folder still has its checkpoints."""
    can_delete: ClassVar[bool] = True

    def open(self, folder: Path) -> StorageBackend:
        raise NotImplementedError

    def save(self, storage: StorageBackend, step: int, **metrics: float) -> str:
        """The id of a checkpoint of this step."""
        return storage.save_checkpoint(payload(step), metadata(step, **metrics)).id

    def test_a_storage_is_a_storage_backend(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        assert isinstance(storage, StorageBackend)
        assert list(storage.list_checkpoints()) == []

    def test_a_checkpoint_comes_back_bit_by_bit(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        saved = storage.save_checkpoint(payload(7), metadata(7, loss=0.5))
        assert (saved.step, saved.time, dict(saved.metrics), saved.problem) == (7, 107.0, {"loss": 0.5}, "")
        assert_same(storage.load_checkpoint(saved.id), payload(7))
        assert storage.verify_checkpoint(saved.id) == []

    def test_what_is_saved_is_a_copy(self, tmp_path: Path) -> None:
        storage, given = self.open(tmp_path), payload(1)
        id = storage.save_checkpoint(given, metadata(1)).id
        for tensor in given.tensors["model"].values():
            tensor.zero_()  # training continues
        given.state["nested"]["list"].clear()
        assert_same(storage.load_checkpoint(id), payload(1))

    def test_checkpoints_are_listed_by_step_with_their_metrics(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        for step in (300, 2, 10_000):
            self.save(storage, step, loss=1.0 / step)
        found = storage.list_checkpoints()
        assert [one.step for one in found] == [2, 300, 10_000]
        assert [one.metrics["loss"] for one in found] == [0.5, 1.0 / 300, 1e-4]
        assert len({one.id for one in found}) == 3

    def test_a_step_saved_again_replaces_the_earlier_one(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        self.save(storage, 5)
        later = storage.save_checkpoint(payload(6), metadata(5))
        assert [one.step for one in storage.list_checkpoints()] == [5]
        assert_same(storage.load_checkpoint(later.id), payload(6))

    def test_a_checkpoint_that_does_not_exist_is_an_error(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        id = self.save(storage, 5)
        unknown = id[:-1] + ("1" if id[-1] != "1" else "2")
        with pytest.raises(Exception, match=r"."):
            storage.load_checkpoint(unknown)

    def test_deleting_one_leaves_the_others(self, tmp_path: Path) -> None:
        if not self.can_delete:
            pytest.skip("this storage keeps everything")
        storage = self.open(tmp_path)
        first, second = (self.save(storage, step) for step in (1, 2))
        storage.delete_checkpoint(first)
        assert [one.id for one in storage.list_checkpoints()] == [second]
        assert_same(storage.load_checkpoint(second), payload(2))
        with pytest.raises(Exception, match=r"."):
            storage.load_checkpoint(first)

    def test_opened_again_it_has_what_was_saved(self, tmp_path: Path) -> None:
        if not self.survives_reopening:
            pytest.skip("this storage ends with its process")
        id = self.save(self.open(tmp_path), 4, loss=0.25)
        storage = self.open(tmp_path)
        assert [(one.step, one.metrics["loss"]) for one in storage.list_checkpoints()] == [(4, 0.25)]
        assert_same(storage.load_checkpoint(id), payload(4))

    def test_a_manager_saves_retains_and_restores(self, tmp_path: Path) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        manager = CheckpointManager(
            tmp_path,
            model=net,
            optimizer=optimizer,
            interval=2,
            storage=self.open(tmp_path),
            keep_last=2 if self.can_delete else None,
        )
        losses = []
        for step in range(1, 7):
            losses.append(_train(net, optimizer))
            manager.step(step)
        assert [one.step for one in manager.list()] == ([4, 6] if self.can_delete else [2, 4, 6])
        assert manager.restore(4) == 4
        assert [_train(net, optimizer) for _ in range(2)] == losses[4:]


def _train(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss: Tensor = net(torch.randn(4, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()
