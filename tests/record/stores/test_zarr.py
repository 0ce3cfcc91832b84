"""The default store: the shared suite under every compression, and what zarr-python makes of the files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.errors import MissingPackageError, RunError, UnknownNameError, UsageError
from sonde.read.lake import FolderLake
from sonde.record import packing
from sonde.record.store import Store, open_store
from sonde.schema.lake import SnapshotDocument
from sonde.schema.tensors import HostTensor, Snapshot
from sonde.testing.stores import StoreTests, awkward_tensors, drifting


class TestZarr(StoreTests):
    def open(self, run: Path) -> Store:
        return open_store("zarr", run)


@pytest.mark.slow
class TestUncompressed(StoreTests):
    def open(self, run: Path) -> Store:
        return open_store("zarr", run, {"compression": "none"})


@pytest.mark.slow
class TestOtherRank(StoreTests):
    def open(self, run: Path) -> Store:
        return open_store("zarr", run, {"rank": 3, "compression": "lz4"})


def group_of(run: Path, step: int) -> Any:
    import zarr

    root: Any = zarr.open_group(run / "tensors", mode="r")
    return root[f"step-{step:09d}"]


def document_of(run: Path, step: int) -> SnapshotDocument:
    return SnapshotDocument.from_bytes((run / f"tensors/step-{step:09d}/zarr.json").read_bytes(), "here")


@pytest.fixture
def small_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few KiB count as large, and a shard is full soon: what takes gigabytes otherwise."""
    monkeypatch.setattr(packing, "LARGE_BYTES", 1 << 12)
    monkeypatch.setattr(packing, "_LARGE_CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(packing, "_MIN_CHUNK_BYTES", 1 << 9)


@pytest.mark.parametrize("compression", ["auto", "none", "zstd", "lz4"])
def test_zarr_python_reads_every_tensor(tmp_path: Path, compression: str) -> None:
    tensors = awkward_tensors()
    store = open_store("zarr", tmp_path, {"compression": compression})
    store.write(Snapshot(9, 0.0, "", tensors))
    store.close()
    group, document = group_of(tmp_path, 9), document_of(tmp_path, 9)
    for name, tensor in tensors.items():
        entry = document.tensors[name]
        assert entry.offset is not None
        found = group[entry.array][entry.offset : entry.offset + entry.size]
        assert found.tobytes() == tensor.flat().tobytes(), name


@pytest.mark.parametrize(
    "shape", [(4097,), (100, 50), (3, 5000), (2, 3, 1100), (2, 3, 7, 99), (5000, 1), (1, 1, 6001), (7, 11, 13, 5)]
)
@pytest.mark.parametrize("shard_bytes", [2000, 9000, 1 << 30])
@pytest.mark.usefixtures("small_large")
def test_a_large_tensor_keeps_its_shape(tmp_path: Path, shape: tuple[int, ...], shard_bytes: int) -> None:
    from sonde.record.local_lake import LocalLake

    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    store = LocalLake(tmp_path, shard_bytes=shard_bytes)
    store.write(Snapshot(1, 0.0, "", {"param/layers.0.weight": HostTensor.of(values)}))
    assert np.array_equal(group_of(tmp_path, 1)["param-layers.0.weight"][...], values)
    assert np.array_equal(store.read(1).tensors["param/layers.0.weight"].values(), values)
    middle = tuple(slice(length // 3, None) for length in shape)
    assert np.array_equal(FolderLake(tmp_path).read_part(1, "param/layers.0.weight", middle), values[middle])
    store.close()


def test_zarr_python_sees_snapshots_and_nothing_else(tmp_path: Path) -> None:
    import zarr

    store = open_store("zarr", tmp_path)
    for step in (1, 2, 3):
        store.write(Snapshot(step, 0.0, "", drifting(step)))
    store.delete(1)  # 2 is a difference to it: it is hidden, not gone
    root: Any = zarr.open_group(tmp_path / "tensors", mode="r")
    assert sorted(name for name, _ in root.members()) == ["step-000000002", "step-000000003"]
    assert root["step-000000002"].attrs["sonde"]["step"] == 2
    store.close()


def test_many_small_tensors_are_few_files(tmp_path: Path) -> None:
    store = open_store("zarr", tmp_path)
    tensors = {f"param/{n}": HostTensor.of(np.full(10, n, np.float32)) for n in range(500)}
    store.write(Snapshot(0, 0.0, "", tensors))
    store.close()
    assert len([path for path in (tmp_path / "tensors/step-000000000").rglob("*") if path.is_file()]) == 3


def test_differences_are_taken_where_they_win_and_chains_are_short(tmp_path: Path) -> None:
    store = open_store("zarr", tmp_path)
    for step in range(20):
        store.write(Snapshot(step, 0.0, "", drifting(step)))
    store.close()
    deltas = [document_of(tmp_path, step).tensors["param/weight"].delta_of for step in range(20)]
    assert deltas == [None if step % 8 == 0 else step - 1 for step in range(20)]
    assert {document_of(tmp_path, step).tensors["grad/weight"].delta_of for step in range(20)} == {None}


def test_an_array_of_differences_says_so_in_its_name(tmp_path: Path) -> None:
    store = open_store("zarr", tmp_path)
    for step in range(2):
        store.write(Snapshot(step, 0.0, "", drifting(step)))
    store.close()
    entry = document_of(tmp_path, 1).tensors["param/weight"]
    assert (entry.array, entry.delta_of) == ("param.float32.delta", 0)
    assert group_of(tmp_path, 1)["param.float32.delta"].dtype == np.uint32


def test_differences_are_smaller(tmp_path: Path) -> None:
    def stored(delta_mib: float) -> int:
        store = open_store("zarr", tmp_path / str(delta_mib), {"delta_mib": delta_mib})
        total = sum(store.write(Snapshot(step, 0.0, "", drifting(step, size=50_000))).stored_bytes for step in range(8))
        store.close()
        return total

    assert stored(64) < 0.9 * stored(0)


def test_memory_for_differences_is_bounded(tmp_path: Path) -> None:
    store = open_store("zarr", tmp_path, {"delta_mib": 0.02})  # one weight of 16 kB fits, the other of 8 kB does not
    for step in range(3):
        store.write(Snapshot(step, 0.0, "", drifting(step)))
    store.close()
    taken = {name for name, entry in document_of(tmp_path, 2).tensors.items() if entry.delta_of is not None}
    assert taken == {"param/weight"}


def test_rounding_is_done_when_asked_and_stated(tmp_path: Path) -> None:
    values = np.array([1.2345678, -3.1e-39, np.nan, np.inf, 3.4028235e38, 0.0], np.float32)
    store = open_store("zarr", tmp_path, {"keep_mantissa_bits": 8})
    store.write(Snapshot(0, 0.0, "", {"param/w": HostTensor.of(values), "batch/x": HostTensor.of(np.arange(3))}))
    found = store.read(0).tensors["param/w"].values()
    store.close()
    assert found[0] == pytest.approx(values[0], rel=2**-9)
    assert found[0] != values[0]
    assert np.isnan(found[2])
    assert found[3] == np.inf
    assert np.isfinite(found[4])
    entries = json.loads((tmp_path / "tensors/step-000000000/zarr.json").read_bytes())["attributes"]["sonde"]["tensors"]
    assert entries["param/w"]["keep_mantissa_bits"] == 8
    assert "keep_mantissa_bits" not in entries["batch/x"]


def test_wrong_options_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match='Did you mean "zstd"'):
        open_store("zarr", tmp_path, {"compression": "zsdt"})
    with pytest.raises(UsageError, match="keep_mantissa_bits"):
        open_store("zarr", tmp_path, {"keep_mantissa_bits": 99})
    with pytest.raises(UsageError, match="no such option"):
        open_store("zarr", tmp_path, {"chunks": 3})
    with pytest.raises(UsageError, match=r'no such option: "compresion"\. Did you mean "compression"'):
        open_store("zarr", tmp_path, {"compresion": "zstd"})
    with pytest.raises(UsageError, match="Known: branch, close_s, compression, delta_mib, keep_local,"):
        open_store("icechunk", tmp_path, {"keep": True})
    with pytest.raises(UsageError, match="delta_mib"):
        open_store("zarr", tmp_path, {"delta_mib": -1})
    with pytest.raises(UnknownNameError, match=r"Known: az://…, gs://…, icechunk, memory, s3://…, zarr\."):
        open_store("cloud", tmp_path)
    with pytest.raises(UnknownNameError, match='Did you mean "zarr"'):
        open_store("zar", tmp_path)


@pytest.mark.parametrize("package", ["numcodecs", "google_crc32c"])
def test_without_its_packages_it_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}.*pip install 'sonde\[tensors\]'"):
        open_store("zarr", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every system call in turn: an error, no trace, and the next snapshot is whole."""
    import os

    tensors = {"grad/weight": drifting(1)["grad/weight"]}
    for nth in range(200):
        run = tmp_path / str(nth)
        store = open_store("zarr", run)
        calls = Breaking(os, nth)
        with monkeypatch.context() as patch:
            calls.install(patch)
            try:
                store.write(Snapshot(1, 0.0, "", tensors))
            except RunError as error:
                assert "step 1" in str(error)  # noqa: PT017
        if not calls.has_broken:
            assert nth > 10
            return
        assert store.steps() == []
        assert [path.name for path in (run / ".tensors").iterdir()] == ["lock"]
        store.write(Snapshot(1, 0.0, "", tensors))
        assert store.read(1).tensors["grad/weight"].flat().tobytes() == tensors["grad/weight"].flat().tobytes()
        store.close()
    raise AssertionError("a snapshot takes fewer calls than this")


def test_writing_imports_no_zarr(tmp_path: Path) -> None:
    """Where training runs, the encoders and nothing else."""
    code = f"""
import sys
from pathlib import Path
import numpy as np
from sonde.record.store import open_store
from sonde.schema.tensors import HostTensor, Snapshot
store = open_store("zarr", Path({str(tmp_path)!r}))
store.write(Snapshot(1, 0.0, "", {{"param/w": HostTensor(np.ones(5, np.uint16), "bfloat16", (5,))}}))
store.close()
print(sorted({{"icechunk", "zarr", "obstore", "ml_dtypes", "torch", "xarray"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_differences_of_a_large_tensor_are_made_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sonde.record import local_lake

    monkeypatch.setattr(local_lake, "_PIECE", 700)
    store = open_store("zarr", tmp_path)
    for step in range(3):
        store.write(Snapshot(step, 0.0, "", drifting(step)))
    assert document_of(tmp_path, 2).tensors["param/weight"].delta_of == 1
    for step in range(3):
        found = store.read(step).tensors["param/weight"]
        assert found.flat().tobytes() == drifting(step)["param/weight"].flat().tobytes()
    store.close()


class Breaking:
    """The nth of the calls that write fails as on a full disk."""

    def __init__(self, os: Any, nth: int) -> None:
        self.os, self.nth, self.count = os, nth, 0

    @property
    def has_broken(self) -> bool:
        return self.count > self.nth

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("write", "writev", "fsync", "rename", "mkdir"):
            patch.setattr(self.os, name, self._breaking(getattr(self.os, name)))

    def _breaking(self, call: Any) -> Any:
        def broken(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            if self.count == self.nth + 1:
                raise OSError(28, "No space left on device")
            return call(*arguments, **keywords)

        return broken
