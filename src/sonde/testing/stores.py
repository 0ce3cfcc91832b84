"""The test suite for stores. To test a new one, write one class that says how it is opened.

class TestMyStore(StoreTests):
    def open(self, run):
        return open_store("mine", run, {})
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.errors import RunError, RunLockedError, UnknownNameError, UsageError
from sonde.schema.snapshots.tensors import STORAGE, HostTensor, Snapshot, storage_dtype
from sonde.write.tensors.store import Store

SHAPES = ((), (1,), (0,), (3, 5), (2, 0, 4), (40, 33))


def awkward_tensors(seed: int = 0) -> dict[str, HostTensor]:
    """Every type in every shape that has broken a store, with random bits, including every NaN."""
    random = np.random.default_rng(seed)
    tensors = {}
    for dtype in STORAGE:
        width = storage_dtype(dtype).itemsize
        for shape in SHAPES:
            size = int(np.prod(shape)) * width
            bits = random.integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8).view(storage_dtype(dtype))
            name = f"param/{dtype}.{'x'.join(map(str, shape)) or 'scalar'}"
            tensors[name] = HostTensor(bits.reshape(shape), dtype, shape)
    whole = random.standard_normal((20, 30)).astype(np.float32)
    tensors["grad/transposed"] = HostTensor.of(whole.T)
    tensors["grad/every_other"] = HostTensor.of(whole[::2, ::-3])
    tensors["act/broadcast"] = HostTensor.of(np.broadcast_to(whole[:1], (4, 30)))
    tensors["optim/0.weight.exp_avg"] = HostTensor.of(whole * 1e-40)
    tensors["batch/input.0"] = HostTensor.of(np.arange(12, dtype=np.int64).reshape(3, 4))
    for name in ("custom/..", "custom/</script>", "custom/ä ö/ü", "custom/" + "n" * 300, "no kind"):
        tensors[name] = HostTensor.of(whole[0])
    return tensors


def drifting(step: int, *, size: int = 4000) -> dict[str, HostTensor]:
    """Weights that change little from step to step, and gradients that change completely."""
    random = np.random.default_rng(7)
    weight = random.standard_normal(size).astype(np.float32)
    for at in range(step):
        weight = weight + np.float32(1e-4) * np.random.default_rng(at).standard_normal(size).astype(np.float32)
    grad = np.random.default_rng(1000 + step).standard_normal(size).astype(np.float32)
    return {
        "param/weight": HostTensor.of(weight),
        "param/half": HostTensor((weight.view(np.uint32) >> 16).astype(np.uint16), "bfloat16", (size,)),
        "grad/weight": HostTensor.of(grad),
    }


def assert_same(found: Snapshot, written: Snapshot) -> None:
    """Equal in every bit."""
    assert (found.attempt, found.step) == (written.attempt, written.step)
    assert (found.time, found.reason) == (written.time, written.reason)
    assert set(found.tensors) == set(written.tensors)
    for name, tensor in written.tensors.items():
        other = found.tensors[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert other.flat().tobytes() == tensor.flat().tobytes(), name


class StoreTests:
    """Subclass it, and say how the store is opened."""

    survives_reopening = True
    """Whether a store that is opened again on the same run still has its snapshots."""

    def open(self, run: Path) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        return tmp_path

    @pytest.fixture
    def store(self, run: Path) -> Any:
        store = self.open(run)
        yield store
        store.close()

    def test_a_store_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.steps() == []

    def test_every_type_and_shape_comes_back_bit_by_bit(self, store: Store) -> None:
        written = Snapshot(500, 1.5, "asked", awkward_tensors())
        receipt = store.write(written)
        assert (receipt.step, receipt.num_tensors, receipt.nbytes) == (500, len(written.tensors), written.nbytes)
        assert receipt.stored_bytes > 0
        assert len(receipt.sha256) == 64
        assert_same(store.read(500), written)

    def test_values_have_the_meaning_of_their_type(self, store: Store) -> None:
        store.write(
            Snapshot(0, 0.0, "", {"param/x": HostTensor(np.array([0x3F80, 0xC000], np.uint16), "bfloat16", (2,))})
        )
        assert store.read(0).tensors["param/x"].values().astype(float).tolist() == [1.0, -2.0]

    def test_one_tensor_is_read_without_the_others(self, store: Store) -> None:
        store.write(Snapshot(3, 0.0, "", drifting(3)))
        found = store.read(3, ["grad/weight"])
        assert list(found.tensors) == ["grad/weight"]
        assert found.tensors["grad/weight"].flat().tobytes() == drifting(3)["grad/weight"].flat().tobytes()

    def test_what_is_written_is_a_copy(self, store: Store) -> None:
        weight = np.ones(1000, np.float32)
        store.write(Snapshot(0, 0.0, "", {"param/w": HostTensor.of(weight)}))
        weight[:] = 2  # the staging memory is reused
        store.write(Snapshot(1, 0.0, "", {"param/w": HostTensor.of(weight)}))
        assert store.read(0).tensors["param/w"].values().tolist() == [1.0] * 1000

    def test_many_snapshots_of_slowly_changing_weights(self, store: Store) -> None:
        for step in range(0, 200, 10):
            store.write(Snapshot(step, float(step), "every", drifting(step)))
        assert store.steps() == list(range(0, 200, 10))
        for step in (0, 70, 80, 190):
            assert_same(store.read(step), Snapshot(step, float(step), "every", drifting(step)))

    def test_steps_are_in_order_however_they_came(self, store: Store) -> None:
        for step in (1_000_000_000, 7, 30, 0):
            store.write(Snapshot(step, 0.0, "", {}))
        assert store.steps() == [0, 7, 30, 1_000_000_000]

    def test_a_step_is_written_once(self, store: Store) -> None:
        first = Snapshot(1, 0.0, "first", drifting(1))
        store.write(first)
        with pytest.raises(UsageError, match="step 1 is already in the store"):
            store.write(Snapshot(1, 0.0, "second", drifting(2)))
        assert_same(store.read(1), first)

    def test_a_step_is_written_once_in_each_attempt(self, store: Store) -> None:
        first, again = Snapshot(1, 0.0, "first", drifting(1)), Snapshot(1, 0.5, "again", drifting(2), attempt=1)
        later = Snapshot(7, 1.0, "later", drifting(7), attempt=12_345)
        for written in (first, again, later):
            store.write(written)
        with pytest.raises(UsageError, match="step 1 of attempt 1 is already in the store"):
            store.write(again)
        assert store.attempts() == [0, 1, 12_345]
        assert [store.steps(), store.steps(1), store.steps(2), store.steps(12_345)] == [[1], [1], [], [7]]
        for written in (first, again, later):
            assert_same(store.read(written.step, attempt=written.attempt), written)
        assert list(store.read(1, ["grad/weight"], attempt=1).tensors) == ["grad/weight"]

    def test_deleting_in_one_attempt_leaves_the_others_readable(self, store: Store) -> None:
        snapshots = [Snapshot(5, float(attempt), "", drifting(attempt), attempt=attempt) for attempt in range(3)]
        for written in snapshots:
            store.write(written)
        store.delete(5, attempt=1)
        assert store.attempts() == [0, 2]
        for written in (snapshots[0], snapshots[2]):
            assert_same(store.read(5, attempt=written.attempt), written)
        for call in (store.read, store.delete):
            with pytest.raises(RunError, match="no snapshot of step 5 of attempt 1"):
                call(5, attempt=1)
        store.write(snapshots[1])
        store.delete(5)
        assert store.attempts() == [1, 2]
        assert_same(store.read(5, attempt=1), snapshots[1])

    def test_deleting_one_leaves_the_others_readable(self, store: Store) -> None:
        steps = list(range(0, 60, 5))
        for step in steps:
            store.write(Snapshot(step, 0.0, "", drifting(step)))
        for gone in (0, 10, 35, 55):
            store.delete(gone)
            steps.remove(gone)
            assert store.steps() == steps
            for step in steps:
                assert_same(store.read(step), Snapshot(step, 0.0, "", drifting(step)))
        store.write(Snapshot(60, 0.0, "", drifting(60)))
        assert_same(store.read(60), Snapshot(60, 0.0, "", drifting(60)))

    def test_what_is_not_there_is_said(self, store: Store) -> None:
        store.write(Snapshot(4, 0.0, "", drifting(4)))
        store.delete(4)
        store.write(Snapshot(5, 0.0, "", drifting(5)))
        for call in (store.read, store.delete):
            with pytest.raises(RunError, match=r"no snapshot of step 4.*5"):
                call(4)
        with pytest.raises(UnknownNameError, match=r'Did you mean "param/weight"'):
            store.read(5, ["param/wieght"])

    def test_closing_twice_is_no_mistake(self, run: Path) -> None:
        store = self.open(run)
        store.write(Snapshot(1, 0.0, "", drifting(1)))
        store.close()
        store.close()

    def test_opened_again_it_has_what_was_written(self, run: Path) -> None:
        if not self.survives_reopening:
            pytest.skip("this store ends with its process")
        store = self.open(run)
        store.write(Snapshot(1, 2.0, "before", drifting(1)))
        store.close()
        store = self.open(run)
        store.write(Snapshot(2, 3.0, "after", drifting(2)))
        store.write(Snapshot(1, 4.0, "again", drifting(3), attempt=1))
        store.close()
        store = self.open(run)
        assert (store.attempts(), store.steps(), store.steps(1)) == ([0, 1], [1, 2], [1])
        assert_same(store.read(1), Snapshot(1, 2.0, "before", drifting(1)))
        assert_same(store.read(1, attempt=1), Snapshot(1, 4.0, "again", drifting(3), attempt=1))
        store.close()

    def test_a_second_writer_is_refused(self, run: Path) -> None:
        if not self.survives_reopening:
            pytest.skip("this store ends with its process")
        store = self.open(run)
        with pytest.raises(RunLockedError, match="another process"):
            self.open(run)
        store.close()
        self.open(run).close()
