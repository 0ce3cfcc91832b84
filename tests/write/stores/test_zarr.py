"""The default store: the shared suite under every compression, and what zarr-python makes of the files."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.errors import MissingPackageError, RunError, UnknownNameError, UsageError
from sonde.read.tensors.stores import FolderTensorStore
from sonde.schema.snapshots.tensors import HostTensor, Snapshot, as_values
from sonde.testing.stores import StoreTests, awkward_tensors, drifting
from sonde.write.tensors import archive_file
from sonde.write.tensors.store import Store, open_store


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
    """As zarr-python opens it, and nothing of sonde."""
    import zarr

    return zarr.open_group(zarr.storage.ZipStore(archive_of(run, step), mode="r"), mode="r")


def archive_of(run: Path, step: int) -> Path:
    return run / f"tensors/step-{step:09d}.zarr.zip"


def entries_of(run: Path, step: int) -> Any:
    with zipfile.ZipFile(archive_of(run, step)) as archive:
        return json.loads(archive.read("zarr.json"))["attributes"]["sonde"]["tensors"]


@pytest.mark.parametrize("compression", ["auto", "none", "zstd", "lz4"])
def test_zarr_python_reads_every_tensor_of_every_snapshot(tmp_path: Path, compression: str) -> None:
    store = open_store("zarr", tmp_path, {"compression": compression})
    for step in range(3):
        store.write(Snapshot(step, 0.0, "", awkward_tensors(step)))
    store.close()
    for step in range(3):
        group, entries = group_of(tmp_path, step), entries_of(tmp_path, step)
        for name, tensor in awkward_tensors(step).items():
            found = group[entries[name]["array"]]
            assert (found.dtype, found.shape) == (tensor.bits.dtype, tensor.shape)
            assert found.attrs["torch_dtype"] == tensor.dtype
            assert found[...].tobytes() == tensor.flat().tobytes(), name


def test_an_array_has_the_name_of_its_tensor(tmp_path: Path) -> None:
    """But for names that Zarr or a file system cannot hold, and those that differ only in case."""
    names = ["param/layers.0.weight", "act/block:0 #1", "optim/0.weight.exp_avg", "param/naïve", "param/W", "param/w"]
    odd = ["custom/..", "no kind", "param/__dunder", "param/zarr.json", "grad/back\\slash", "batch/" + "n" * 300]
    store = open_store("zarr", tmp_path)
    store.write(Snapshot(0, 0.0, "", {name: HostTensor.of(np.arange(3)) for name in names + odd}))
    store.close()
    group, entries = group_of(tmp_path, 0), entries_of(tmp_path, 0)
    assert [entries[name]["array"] for name in names[:-1]] == names[:-1]
    changed = [entries[name]["array"] for name in [names[-1], *odd]]
    assert not {*names, *odd} & set(changed)
    assert len(set(changed)) == len(changed)
    for name in names + odd:
        assert group[entries[name]["array"]][:].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "shape", [(4097,), (100, 50), (3, 5000), (2, 3, 1100), (2, 3, 7, 99), (5000, 1), (1, 1, 6001), (7, 11, 13, 5)]
)
@pytest.mark.parametrize("num_threads", [0, 3])
def test_a_large_tensor_in_many_chunks_keeps_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], num_threads: int
) -> None:
    monkeypatch.setattr(archive_file, "NUM_THREADS", num_threads)
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    store = open_store("zarr", tmp_path, {"chunk_mib": 1 / 1024})  # what takes gigabytes otherwise
    store.write(Snapshot(1, 0.0, "", {"param/layers.0.weight": HostTensor.of(values)}))
    assert np.array_equal(group_of(tmp_path, 1)["param/layers.0.weight"][...], values)
    assert np.array_equal(store.read(1).tensors["param/layers.0.weight"].values(), values)
    middle = tuple(slice(length // 3, None) for length in shape)
    assert np.array_equal(FolderTensorStore(tmp_path).read_part(1, "param/layers.0.weight", middle), values[middle])
    store.close()


def test_codec_level_and_chunk_size_are_those_that_were_asked_for(tmp_path: Path) -> None:
    compression = {"param": "zstd:7", "optim": "lz4:2", "grad": "none"}
    store = open_store("zarr", tmp_path, {"compression": compression, "chunk_mib": 0.5})
    values = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)  # 1 MiB
    names = ["param/weight", "optim/weight.exp_avg", "grad/weight", "act/weight"]
    store.write(Snapshot(1, 0.0, "", {name: HostTensor.of(values) for name in names}))
    store.close()
    group = group_of(tmp_path, 1)
    found = [[c.to_dict()["configuration"] for c in group[name].compressors if "cname" in str(c)] for name in names]
    assert [[(c["cname"], c["clevel"]) for c in one] for one in found] == [
        [("zstd", 7)], [("lz4", 2)], [], [("lz4", 5)]
    ]  # fmt: skip
    assert {group[name].chunks for name in names} == {(256, 512)}
    assert all(np.array_equal(group[name][...], values) for name in names)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compression": "zstd:10"}, "zstd:0 to zstd:9"),
        ({"compression": "none:1"}, "no such level"),
        ({"compression": {"weights": "zstd"}}, "kind of tensor"),
        ({"compression": {"param": "zip"}}, "compression"),
        ({"compression": 3}, "must be text"),
        ({"chunk_mib": 0}, "chunk_mib must be above 0"),
    ],
)
def test_a_wrong_codec_level_or_chunk_size_is_refused(tmp_path: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_store("zarr", tmp_path, options)


def test_xarray_opens_the_tensors_of_a_kind(tmp_path: Path) -> None:
    import xarray
    import zarr

    tensors = drifting(0)
    store = open_store("zarr", tmp_path)
    store.write(Snapshot(0, 0.0, "", {**tensors, "param/scale": HostTensor.of(np.float32(2.5).reshape(()))}))
    store.close()
    archive = zarr.storage.ZipStore(archive_of(tmp_path, 0), mode="r")
    found = xarray.open_zarr(archive, group="param", consolidated=False)
    assert found["weight"].dims == ("weight.d0",)
    assert found["weight"].values.tobytes() == tensors["param/weight"].flat().tobytes()
    assert found["scale"].item() == 2.5


def test_what_is_missing_is_not_a_number_for_other_readers(tmp_path: Path) -> None:
    """Zarr gives the fill value where a chunk is missing: never something that looks like a weight."""
    tensors = awkward_tensors()
    floats = {name: t for name, t in tensors.items() if t.dtype.startswith(("float", "bfloat", "complex")) and t.nbytes}
    store = open_store("zarr", tmp_path)
    store.write(Snapshot(0, 0.0, "", floats))
    store.close()
    group, entries = group_of(tmp_path, 0), entries_of(tmp_path, 0)
    for name, tensor in floats.items():
        fill = np.asarray(group[entries[name]["array"]].fill_value, tensor.bits.dtype).reshape(1)
        assert np.isnan(as_values(fill, tensor.dtype).astype(complex)).all(), name


def test_a_snapshot_is_one_file(tmp_path: Path) -> None:
    store = open_store("zarr", tmp_path)
    tensors = {f"param/{n}": HostTensor.of(np.full(10, n, np.float32)) for n in range(500)}
    store.write(Snapshot(0, 0.0, "", tensors))
    store.close()
    assert [path.name for path in (tmp_path / "tensors").iterdir()] == ["step-000000000.zarr.zip"]


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
    entries = entries_of(tmp_path, 0)
    assert entries["param/w"]["keep_mantissa_bits"] == 8
    assert "keep_mantissa_bits" not in entries["batch/x"]


def test_wrong_options_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match='Did you mean "zstd"'):
        open_store("zarr", tmp_path, {"compression": "zsdt"})
    with pytest.raises(UsageError, match="keep_mantissa_bits"):
        open_store("zarr", tmp_path, {"keep_mantissa_bits": 99})
    with pytest.raises(UsageError, match="has no option"):
        open_store("zarr", tmp_path, {"chunks": 3})
    with pytest.raises(UsageError, match=r'no option "compresion"\. Did you mean "compression"'):
        open_store("zarr", tmp_path, {"compresion": "zstd"})
    with pytest.raises(UsageError, match="Known: branch, chunk_mib, close_s, compression, keep_local,"):
        open_store("icechunk", tmp_path, {"keep": True})
    with pytest.raises(UnknownNameError, match=r"Known: az://…, gs://…, icechunk, memory, s3://…, zarr\."):
        open_store("cloud", tmp_path)
    with pytest.raises(UnknownNameError, match='Did you mean "zarr"'):
        open_store("zar", tmp_path)


@pytest.mark.parametrize("package", ["numcodecs", "google_crc32c"])
def test_without_its_packages_it_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}.*pip install 'sonde-ml\[tensors\]'"):
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
import zipfile
from pathlib import Path
import numpy as np
from sonde.write.tensors.store import open_store
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
store = open_store("zarr", Path({str(tmp_path)!r}))
store.write(Snapshot(1, 0.0, "", {{"param/w": HostTensor(np.ones(5, np.uint16), "bfloat16", (5,))}}))
store.close()
print(sorted({{"icechunk", "zarr", "obstore", "ml_dtypes", "torch", "xarray"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


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
