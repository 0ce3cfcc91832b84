"""Runs of format 1, which an earlier version wrote: packed arrays in shards, and most tensors as the difference to the
snapshot before. Every value must read as it was written, and such a run must be able to continue.

`data/format-1.tar.xz` was made by that version: eleven snapshots by the store "zarr" and by the store "icechunk", of
which 1 and 9 were deleted, although 2 and 10 are a difference to them.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from sonde.errors import CorruptError, RunError
from sonde.read.tensors.lake import open_lake
from sonde.schema.lake import SnapshotDocument, _sum
from sonde.schema.tensors import HostTensor, Snapshot
from sonde.schema.uploads import UploadState, upload_file
from sonde.testing.stores import awkward_tensors, drifting
from sonde.write.folder import create_run
from sonde.write.tensors.push import push
from sonde.write.tensors.store import open_store
from sonde.write.writer import Writer, WriterOptions

DATA = Path(__file__).parent / "data" / "format-1.tar.xz"
STEPS = [0, 2, 3, 4, 5, 6, 7, 8, 10]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(DATA) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(unpacked: Path, tmp_path: Path) -> Path:
    return shutil.copytree(unpacked / "zarr", tmp_path / "zarr")


def written(step: int, *, store: str = "zarr") -> dict[str, HostTensor]:
    """What the earlier version was given."""
    tensors = drifting(step, size=300)
    tensors["optim/weight.exp_avg"] = drifting(step + 1, size=300)["param/weight"]
    tensors["param/counter"] = HostTensor.of(np.array(step, np.int64))
    tensors["param/empty"] = HostTensor.of(np.empty((0, 3), np.float32))
    if step < 3 and store == "zarr":
        values = np.repeat(np.arange(1025, dtype=np.float32), 4096).reshape(1025, 4096)  # an array of its own
        tensors["param/large"] = HostTensor.of(values + np.float32(step) * 2**-10)
    if step == 3:
        tensors |= {name: tensor for name, tensor in awkward_tensors().items() if tensor.nbytes <= 240}
    if store == "icechunk":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(("custom", "no "))}
    return tensors


def assert_reads(lake: Any, step: int, tensors: dict[str, HostTensor]) -> None:
    assert set(lake.entries(step)) == set(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != "complex32":
            assert lake.read(step, name).tobytes() == tensor.flat().tobytes(), (step, name)


def test_most_tensors_of_the_old_run_are_differences(old: Path) -> None:
    """Else this file tests nothing."""
    lake = open_lake(old)
    bases = {step: lake.entries(step)["param/weight"].delta_of for step in lake.steps}
    assert bases == {0: None, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: None, 10: 9}


@pytest.mark.parametrize("store", ["zarr", pytest.param("icechunk", marks=pytest.mark.slow)])
def test_every_value_reads_as_it_was_written(unpacked: Path, store: str) -> None:
    lake = open_lake(unpacked / store)
    assert lake.steps == STEPS
    for step in STEPS:
        assert_reads(lake, step, written(step, store=store))


def test_a_part_is_read_through_the_differences(old: Path) -> None:
    lake, large = open_lake(old), written(2)["param/large"].values()
    assert np.array_equal(lake.read_part(2, "param/large", (slice(300, 700, 7), slice(5, 9))), large[300:700:7, 5:9])


def test_the_run_opens_and_is_exported(old: Path, tmp_path: Path) -> None:
    path = create_run(tmp_path / "runs", project="old", name=None, config={}, tags=(), notes="")
    Writer(path, WriterOptions()).close("finished")
    shutil.copytree(old, path, dirs_exist_ok=True)
    run = sonde.open(path)
    assert run.snapshots()["step"].to_pylist() == STEPS
    assert run.snapshot(7)["param/weight"].tobytes() == written(7)["param/weight"].flat().tobytes()
    assert run.tensor("param/weight").sel(step=10).values.tobytes() == written(10)["param/weight"].flat().tobytes()
    assert run.verify() == []


def test_a_continued_run_has_snapshots_of_both_formats(old: Path) -> None:
    store = open_store("zarr", old)
    store.write(Snapshot(11, 0.0, "", written(11)))
    store.write(Snapshot(1, 0.0, "", written(5)))  # was deleted; 2 stays the difference to the one that was here before
    store.close()
    lake = open_lake(old)
    assert lake.steps == [0, 1, *STEPS[1:], 11]
    for step, tensors in ((1, written(5)), (2, written(2)), (10, written(10)), (11, written(11))):
        assert_reads(lake, step, tensors)


def test_what_others_need_is_not_deleted(old: Path) -> None:
    store = open_store("zarr", old)
    with pytest.raises(RunError, match=r"step 3 stays.*stored step 4 as the difference to it\. Delete step 4 first"):
        store.delete(3)
    for step in (7, 6, 5, 4, 3):
        store.delete(step)
    assert store.steps() == [0, 2, 8, 10]
    store.close()
    for step in (0, 2, 8, 10):
        assert_reads(open_lake(old), step, written(step))


def damaged(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_never_a_number(old: Path) -> None:
    """In the tensor's own shard, and in the one that it is a difference to."""
    folder = old / "tensors/step-000000003"
    for path in [folder / "param.float32.delta/c/0", old / "tensors/step-000000002/param.float32.delta/c/0"]:
        data = path.read_bytes()
        for position in range(0, len(data), 37):
            damaged(path, position)
            with pytest.raises(CorruptError, match='tensor "param/weight" at step'):
                open_lake(old).read(3, "param/weight")
            path.write_bytes(data)


def test_a_shard_cut_short_is_refused(old: Path) -> None:
    path = old / "tensors/step-000000008/grad.float32/c/0"
    data = path.read_bytes()
    for length in (0, 1, 19, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptError, match=r'tensor "grad/weight" at step 8'):
            open_lake(old).read(8, "grad/weight")


def rewrite(run: Path, step: int, edit: Any) -> None:
    """Change a document and sign it again, as somebody with bad intentions would."""
    path = run / f"tensors/step-{step:09d}/zarr.json"
    group = json.loads(path.read_bytes())
    edit(group["attributes"]["sonde"])
    group["attributes"]["sonde_crc32"] = f"{_sum(group['attributes']['sonde']):08x}"
    path.write_text(json.dumps(group))


def test_differences_in_a_circle_are_refused(old: Path) -> None:
    rewrite(old, 3, lambda content: content["tensors"]["param/weight"].update(delta_of=3))
    with pytest.raises(CorruptError, match="circles"):
        open_lake(old).read(3, "param/weight")


def test_an_array_outside_the_snapshot_is_refused(old: Path) -> None:
    def edit(content: Any) -> None:
        content["arrays"]["../../../etc"] = content["arrays"].pop("grad.float32")
        content["tensors"]["grad/weight"]["array"] = "../../../etc"

    rewrite(old, 8, edit)
    with pytest.raises(CorruptError, match="damaged"):
        open_lake(old).read(8, "grad/weight")


@pytest.mark.parametrize(
    "edit", [{"shape": [1 << 62]}, {"shape": [-1]}, {"shard_length": 0}, {"shard_length": 1 << 50}]
)
def test_an_array_that_cannot_be_is_refused(old: Path, edit: dict[str, Any]) -> None:
    rewrite(old, 8, lambda content: content["arrays"]["grad.float32"].update(edit))
    with pytest.raises(CorruptError):
        open_lake(old).read(8, "grad/weight")


@pytest.mark.slow
def test_the_store_reads_from_the_old_repository_and_continues_it(unpacked: Path, tmp_path: Path) -> None:
    old = shutil.copytree(unpacked / "icechunk", tmp_path / "icechunk")
    store: Any = open_store("icechunk", old, {"close_s": 120.0})
    for step in (2, 7, 10):
        found = store.read(step)
        for name, tensor in written(step, store="icechunk").items():
            assert found.tensors[name].flat().tobytes() == tensor.flat().tobytes(), (step, name)
    with pytest.raises(RunError, match=r"step 3 stays.*Delete step 4 first"):
        store.delete(3)
    store.write(Snapshot(11, 0.0, "", written(11)))
    assert store.drain(120)
    store.delete(10)
    store.close()
    lake = open_lake(old)
    assert lake.steps == [*STEPS[:-1], 11]
    for step in (2, 7):
        assert_reads(lake, step, written(step, store="icechunk"))
    assert_reads(lake, 11, written(11))


@pytest.mark.slow
def test_old_snapshots_that_wait_in_the_spool_are_uploaded_as_values(old: Path) -> None:
    """The far side gets plain arrays, whatever they were a difference to."""
    upload_file(old).write_bytes(UploadState("icechunk", "main", keeps_local=False).to_bytes())
    assert push(old).waiting == 0
    assert [path.name for path in (old / "tensors").iterdir()] == ["zarr.json"]
    lake = open_lake(old)
    assert lake.steps == STEPS
    for step in STEPS:
        assert_reads(lake, step, written(step))
        assert lake.document(step).bases == set()


def test_a_document_of_format_1_says_so(old: Path) -> None:
    data = (old / "tensors/step-000000003/zarr.json").read_bytes()
    assert json.loads(data)["attributes"]["sonde"]["format"] == 1
    assert SnapshotDocument.from_bytes(data, "here").bases == {2}
