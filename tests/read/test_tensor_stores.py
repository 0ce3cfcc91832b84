"""Reading whole tensors: only what is needed, and a CorruptError wherever a bit is not as it was written."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sonde.errors import CorruptError, FormatError, RunError, UnknownNameError, UsageError
from sonde.read.tensors.stores import FolderTensorStore, open_tensor_store
from sonde.schema.snapshots.document import SnapshotDocument
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.testing.stores import awkward_tensors, drifting
from sonde.write.tensors.store import open_store

STEP = "tensors/step-000000001.zarr.zip"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two snapshots."""
    return written(tmp_path, {})


def written(run: Path, options: dict[str, Any], *, size: int = 500) -> Path:
    store = open_store("zarr", run, options)
    for step in range(2):
        store.write(Snapshot(step, float(step), "every", drifting(step, size=size)))
    store.close()
    return run


def test_values_have_their_own_types(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    store = open_store("zarr", tmp_path)
    store.write(Snapshot(3, 0.0, "", tensors))
    store.close()
    reader = open_tensor_store(tmp_path)
    assert reader.steps == [3]
    for name, tensor in tensors.items():
        found = reader.read(3, name)
        assert found.shape == tensor.shape
        if tensor.dtype != "complex32":  # which numpy lacks: it is read as complex64
            assert found.dtype.name == tensor.dtype
            assert found.tobytes() == tensor.flat().tobytes()


def test_complex32_is_read_as_complex64(tmp_path: Path) -> None:
    pairs = np.array([1.5, -2.0, 0.25, 8.0], np.float16)
    store = open_store("zarr", tmp_path)
    store.write(Snapshot(0, 0.0, "", {"act/x": HostTensor(pairs.view(np.uint32), "complex32", (2,))}))
    store.close()
    assert open_tensor_store(tmp_path).read(0, "act/x").tolist() == [1.5 - 2j, 0.25 + 8j]


@pytest.mark.parametrize(
    "index",
    [
        3,
        -1,
        slice(None),
        slice(2, 9),
        slice(30, 2, -7),
        slice(5, 5),
        slice(-6, None, 2),
        (4, slice(1, 3)),
        (slice(1, 30, 4), -2),
        (slice(None), slice(None), 1),
        (0, 1, 2),
        (),
    ],
)
@pytest.mark.parametrize("compression", ["none", "auto"])
def test_a_part_is_what_numpy_would_cut_out(tmp_path: Path, index: Any, compression: str) -> None:
    values = np.arange(40 * 7 * 5, dtype=np.float32).reshape(40, 7, 5)
    store = open_store("zarr", tmp_path, {"compression": compression})
    for step in range(2):
        store.write(Snapshot(step, 0.0, "", {"param/pad": HostTensor.of(values[0]), "param/x": HostTensor.of(values)}))
    store.close()
    for step in range(2):
        assert np.array_equal(open_tensor_store(tmp_path).read_part(step, "param/x", index), values[index])


def test_a_wrong_index_is_said(run: Path) -> None:
    reader = open_tensor_store(run)
    with pytest.raises(UsageError, match=r"out of range for param/weight.*500"):
        reader.read_part(1, "param/weight", 500)
    with pytest.raises(UsageError, match="1 dimensions, but the index has 2"):
        reader.read_part(1, "param/weight", (0, 0))


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    reader = open_tensor_store(run)
    with pytest.raises(RunError, match=r"no snapshot of step 7.*Snapshots exist at steps 0, 1"):
        reader.read(7, "param/weight")
    with pytest.raises(UnknownNameError, match='Did you mean "grad/weight"'):
        reader.read(1, "grad/wieght")
    nothing = open_tensor_store(tmp_path / "empty")
    assert nothing.steps == []
    with pytest.raises(RunError, match=r"snapshots=sonde\.every"):
        nothing.read(0, "param/weight")


def test_snapshots_that_come_later_are_seen(run: Path) -> None:
    reader = open_tensor_store(run)
    assert reader.steps == [0, 1]
    store = open_store("zarr", run)
    store.write(Snapshot(2, 2.0, "", drifting(2, size=500)))
    assert reader.steps == [0, 1, 2]
    assert reader.read(2, "param/weight").tobytes() == drifting(2, size=500)["param/weight"].flat().tobytes()
    store.delete(0)
    assert reader.steps == [1, 2]
    assert reader.read(1, "param/weight").tobytes() == drifting(1, size=500)["param/weight"].flat().tobytes()
    store.close()


def bytes_read() -> int:
    """By this process so far, as the kernel counts them."""
    return int(psutil.Process().io_counters().read_chars)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "auto"])
def test_one_layer_over_200_snapshots_reads_little(tmp_path: Path, compression: str) -> None:
    """Of a hundred layers one percent must be read; two is the limit, directories and documents included."""
    random = np.random.default_rng(0)
    layers = {f"param/layers.{n}.weight": random.standard_normal((128, 64)).astype(np.float32) for n in range(300)}
    store = open_store("zarr", tmp_path, {"compression": compression})
    for step in range(200):
        for values in layers.values():
            values *= np.float32(1.0001)
        store.write(Snapshot(step, 0.0, "", {name: HostTensor.of(values) for name, values in layers.items()}))
    store.close()
    total = sum(path.stat().st_size for path in (tmp_path / "tensors").rglob("*") if path.is_file())
    reader, before = FolderTensorStore(tmp_path), bytes_read()
    series = [reader.read(step, "param/layers.150.weight") for step in reader.steps]
    num_bytes = bytes_read() - before
    assert len(series) == 200
    assert np.array_equal(series[-1], layers["param/layers.150.weight"])
    assert num_bytes < 0.02 * total, f"{num_bytes / total:.2%}"


def test_one_layer_is_read_without_the_others(tmp_path: Path) -> None:
    """The quick form of the same, on one snapshot without its document."""
    layers = {f"param/{n}": np.random.default_rng(n).standard_normal(1 << 14).astype(np.float32) for n in range(100)}
    store = open_store("zarr", tmp_path)
    store.write(Snapshot(0, 0.0, "", {name: HostTensor.of(values) for name, values in layers.items()}))
    store.close()
    reader = FolderTensorStore(tmp_path)
    reader.entries(0)
    before = bytes_read()
    found = reader.read(0, "param/50")
    assert bytes_read() - before < 0.025 * sum(values.nbytes for values in layers.values())
    assert np.array_equal(found, layers["param/50"])


def test_many_threads_may_read_one_store(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = open_store("zarr", tmp_path)
    for step in range(10):
        store.write(Snapshot(step, 0.0, "", drifting(step, size=500)))
    store.close()
    reader = open_tensor_store(tmp_path)
    truth = [drifting(step, size=500)["param/weight"].flat().tobytes() for step in range(10)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda step: reader.read(step, "param/weight").tobytes(), list(range(10)) * 20))
    assert found == truth * 20


# -------------------------------------------------------------------------------------------------------------- damage


def outcome(run: Path, step: int = 1) -> dict[str, Any]:
    """What each tensor reads as: its bytes, or "refused"."""
    reader = open_tensor_store(run)
    try:
        names = list(reader.entries(step))
    except RunError:
        return {}
    found: dict[str, Any] = {}
    for name in names:
        for how in (
            lambda name=name: reader.read(step, name),
            lambda name=name: reader.read_part(step, name, slice(None)),
        ):
            try:
                found.setdefault(name, set()).add(how().tobytes())
            except RunError:
                found.setdefault(name, set()).add("refused")
    return found


def sweep(run: Path, positions: Any) -> tuple[int, int]:
    """Flip one bit at a time. Returns how many flips were tried and how many were refused somewhere."""
    truth = {name: tensor.flat().tobytes() for name, tensor in drifting(1, size=500).items()}
    num_tried = num_refused = 0
    for path in sorted(path for path in (run / "tensors").rglob("*") if path.is_file()):
        data = path.read_bytes()
        for position, bit in positions(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << int(bit)
            path.write_bytes(damaged)
            found = outcome(run)
            num_tried += 1
            num_refused += not found or any("refused" in results for results in found.values())
            for name, results in found.items():
                assert results <= {"refused", truth.get(name)}, f"{path.name} byte {position} bit {bit}: {name}"
        path.write_bytes(data)
    return num_tried, num_refused


@pytest.mark.parametrize("compression", ["none", "auto"])
def test_a_flipped_bit_is_never_a_number(tmp_path: Path, compression: str) -> None:
    run = written(tmp_path, {"compression": compression})
    random = np.random.default_rng(1)
    tried, refused = sweep(
        run, lambda length: [(int(random.integers(length)), int(random.integers(8))) for _ in range(120)]
    )
    assert tried == 240
    assert refused > tried // 4  # documents of arrays are for other readers: a flip there changes nothing here


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "auto"])
def test_no_bit_of_any_byte_becomes_a_number(tmp_path: Path, compression: str) -> None:
    run = written(tmp_path, {"compression": compression})
    tried, _ = sweep(run, lambda length: [(position, (5 * position) % 8) for position in range(0, length, 3)])
    assert tried > 2000


def entry_span(path: Path, key: str) -> tuple[int, int]:
    """Where the bytes of an entry are in the file."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(key)
    start = path.read_bytes().index(key.encode(), info.header_offset) + len(key)
    return start, start + info.file_size


def change(path: Path, key: str, change: Callable[[bytes], bytes | None]) -> None:
    """Another content of one entry, with ZIP's checksums as they should be; None: without it."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            new = change(data) if name == key else data
            if new is not None:
                archive.writestr(name, new)


def test_every_bit_of_a_chunk_is_covered(tmp_path: Path) -> None:
    """Nothing in a chunk is without a checksum: each byte, flipped, is noticed by its tensor."""
    run = written(tmp_path, {"compression": "none"}, size=40)
    path = run / STEP
    data = path.read_bytes()
    start, stop = entry_span(path, "param/weight/c/0")
    assert stop - start == 40 * 4 + 4
    for position in range(start, stop):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r'tensor "param/weight" at step 1'):
            open_tensor_store(run).read(1, "param/weight")


def test_a_changed_letter_of_a_document_is_refused(run: Path) -> None:
    """It is still JSON, and everything in it is still possible."""
    change(run / STEP, "zarr.json", lambda data: data.replace(b'"grad/weight":', b'"grad/weighs":'))
    with pytest.raises(CorruptError, match="checksum of the document"):
        open_tensor_store(run).entries(1)


def test_what_was_read_belongs_to_the_reader(run: Path) -> None:
    """Changing what was read changes nothing of what is read next."""
    reader = open_tensor_store(run)
    for _ in range(2):
        for step in (0, 1):
            found = reader.read(step, "param/weight")
            assert found.tobytes() == drifting(step, size=500)["param/weight"].flat().tobytes()
            found[:] = 0
            part = reader.read_part(step, "param/weight", slice(3, 9))
            assert part.tobytes() == drifting(step, size=500)["param/weight"].flat()[3:9].tobytes()
            part[:] = 0


def test_a_chunk_cut_short_or_missing_is_refused(run: Path) -> None:
    data = (run / STEP).read_bytes()
    for length in (0, 1, 3, 4, 19, 20, 900, None):
        change(run / STEP, "grad/weight/c/0", lambda chunk, n=length: None if n is None else chunk[:n])
        with pytest.raises(CorruptError, match=r'tensor "grad/weight" at step 1'):
            open_tensor_store(run).read(1, "grad/weight")
        (run / STEP).write_bytes(data)


def test_a_file_cut_short_is_refused(run: Path) -> None:
    data = (run / STEP).read_bytes()
    for length in (0, 1, 21, 22, len(data) // 2, len(data) - 1):
        (run / STEP).write_bytes(data[:length])
        with pytest.raises(CorruptError, match=r"step-000000001.zarr.zip is damaged"):
            open_tensor_store(run).entries(1)


def test_a_whole_chunk_of_another_step_is_refused(tmp_path: Path) -> None:
    """The chunk's checksum fits; only the tensor's own tells."""
    run = written(tmp_path, {"compression": "none"})
    with zipfile.ZipFile(run / "tensors/step-000000000.zarr.zip") as archive:
        other = archive.read("grad/weight/c/0")
    change(run / STEP, "grad/weight/c/0", lambda _: other)
    with pytest.raises(CorruptError, match=r'tensor "grad/weight" at step 1 .* its checksum does not match'):
        open_tensor_store(run).read(1, "grad/weight")


def test_zarr_python_refuses_a_flipped_bit_too(tmp_path: Path) -> None:
    """By ZIP's checksum, and by the chunk's own where that one was made to fit."""
    import zarr

    run = written(tmp_path, {"compression": "none"})
    path = run / STEP
    data = bytearray(path.read_bytes())
    data[entry_span(path, "grad/weight/c/0")[0] + 40] ^= 1
    path.write_bytes(data)
    group: Any = zarr.open_group(zarr.storage.ZipStore(path, mode="r"), mode="r")
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        group["grad/weight"][...]
    run = written(tmp_path / "other", {"compression": "none"})
    change(run / STEP, "grad/weight/c/0", lambda chunk: chunk[:40] + b"\0" + chunk[41:])
    group = zarr.open_group(zarr.storage.ZipStore(run / STEP, mode="r"), mode="r")
    with pytest.raises(ValueError, match="checksum"):
        group["grad/weight"][...]


# ------------------------------------------------------------------------------------------------- folders of strangers


def rewrite(run: Path, edit: Any) -> None:
    """Change a document and sign it again, as somebody with bad intentions would."""
    from sonde.schema.snapshots.document import _sum

    def edited(data: bytes) -> bytes:
        group = json.loads(data)
        edit(group["attributes"]["sonde"])
        group["attributes"]["sonde_crc32"] = f"{_sum(group['attributes']['sonde']):08x}"
        return json.dumps(group).encode()

    change(run / STEP, "zarr.json", edited)


@pytest.mark.parametrize("array", ["../../../etc", "param/../x", "..", "a\\..\\b", "param//weight"])
def test_an_array_outside_the_snapshot_is_refused(run: Path, array: str) -> None:
    rewrite(run, lambda content: content["tensors"]["grad/weight"].update(array=array))
    with pytest.raises(CorruptError, match="damaged"):
        open_tensor_store(run).read(1, "grad/weight")


@pytest.mark.parametrize("name", ["tensors/step-000000001.zarr.zip", "tensors"])
def test_a_link_is_not_followed(tmp_path: Path, name: str) -> None:
    run, secret = written(tmp_path / "run", {}), tmp_path / "secret"
    shutil.move(run / name, secret)
    (run / name).symlink_to(secret)
    with pytest.raises(CorruptError, match="leads out"):
        open_tensor_store(run).read(1, "grad/weight")


@pytest.mark.parametrize(
    "edit",
    [
        {"shape": [1 << 62]},
        {"shape": [1 << 40, 1 << 10]},
        {"shape": [-1]},
        {"shape": ["x"]},
        {"shape": [501]},
        {"length": 1 << 60},
        {"length": 0},
        {"axis": 1},
        {"axis": -1},
        {"dtype": "float31"},
        {"dtype": "float64"},
    ],
)
def test_a_tensor_that_cannot_be_is_refused(run: Path, edit: dict[str, Any]) -> None:
    rewrite(run, lambda content: content["tensors"]["grad/weight"].update(edit))
    with pytest.raises(CorruptError):
        open_tensor_store(run).read(1, "grad/weight")


def test_a_directory_too_large_to_read_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonde.schema.snapshots.archive.MAX_DOCUMENT_BYTES", 300)
    with pytest.raises(CorruptError, match="too large"):
        open_tensor_store(run).entries(1)


def test_a_newer_format_is_said(run: Path) -> None:
    rewrite(run, lambda content: content.update(format=99))
    with pytest.raises(FormatError, match="pip install -U sonde-ml"):
        open_tensor_store(run).read(1, "grad/weight")


def test_a_document_is_the_same_after_reading_it(run: Path) -> None:
    with zipfile.ZipFile(run / STEP) as archive:
        data = archive.read("zarr.json")
    assert SnapshotDocument.from_bytes(data, "here").to_bytes() == data


def test_reading_leaves_no_file_open(run: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = open_tensor_store(run)
    for name in reader.entries(1):
        reader.read(1, name)
    assert len(os.listdir("/proc/self/fd")) == before
