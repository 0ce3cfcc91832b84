"""Runs of format 1, which earlier versions wrote, read as they were written and can be continued.

`data/format-1-runs.tar.gz` has runs from before there were attempts, one finished, one killed and one resumed, and what
was read of them then. `data/format-1-tensors.tar.xz` has whole tensors in packed arrays, most of them stored as the
difference to the snapshot before: eleven snapshots by the store "zarr" and by the store "icechunk", of which 1 and 9
were deleted, although 2 and 10 are a difference to them.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from sonde.errors import CorruptError, RunError
from sonde.read.tensors.stores import open_tensor_store
from sonde.schema.layout import FORMAT_VERSION
from sonde.schema.records import ScalarsRecord, StatsRecord
from sonde.schema.sketch import SUMSQ, N, empty_rows
from sonde.schema.snapshots.document import SnapshotDocument, _sum
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.schema.snapshots.uploads import UploadState, upload_file
from sonde.testing.stores import awkward_tensors, drifting
from sonde.write.folder import create_run
from sonde.write.tensors.push import push
from sonde.write.tensors.store import open_store
from sonde.write.writer import Writer, WriterOptions

DATA = Path(__file__).parent / "data"
NAMES = ("finished", "killed", "resumed")
OPTIONS = WriterOptions(flush_interval_s=0.01, heartbeat_s=0.05, seal_steps=4, system_interval_s=0)
STEPS = [0, 2, 3, 4, 5, 6, 7, 8, 10]


def unpack(archive: str, folder: Path) -> Path:
    with tarfile.open(DATA / archive) as opened:
        opened.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def unpacked_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("format-1-runs.tar.gz", tmp_path_factory.mktemp("runs"))


@pytest.fixture
def old_runs(unpacked_runs: Path, tmp_path: Path) -> Path:
    """A copy, to write to."""
    return shutil.copytree(unpacked_runs, tmp_path / "runs")


@pytest.fixture(scope="module")
def unpacked_tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("format-1-tensors.tar.xz", tmp_path_factory.mktemp("tensors"))


@pytest.fixture
def old_tensors(unpacked_tensors: Path, tmp_path: Path) -> Path:
    """A copy of what the store "zarr" wrote."""
    return shutil.copytree(unpacked_tensors / "zarr", tmp_path / "zarr")


# ---------------------------------------------------------------------------------------------------------------- runs


def expected(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())[name]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_as_it_did(unpacked_runs, name):
    run, then = sonde.open(unpacked_runs / name), expected(unpacked_runs, name)
    assert run.manifest.heartbeat.attempt == -1
    assert (run.status, run.last_step, run.warnings) == (then["status"], then["last_step"], then["warnings"])
    assert run.stats("*/*/norm").to_pydict() == then["stats"]
    assert run.scalars().drop_columns("time").to_pydict() == then["scalars"]
    assert run.overview("grad/*/rms", points=10).to_pydict() == then["overview"]
    assert run.events()["type"].to_pylist() == then["events"]
    assert run.verify() == []


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_attempt(unpacked_runs, name):
    run = sonde.open(unpacked_runs / name)
    table = run.attempts().drop_columns("started").to_pylist()
    assert table == [{"attempt": 0, "first_step": 0, "last_step": run.last_step, "reason": "start"}]
    assert run.attempt(0).scalars().equals(run.scalars())


@pytest.mark.parametrize("first_step", [None, 12])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_continued_by_a_new_attempt(old_runs, name, first_step):
    then = sonde.open(old_runs / name).scalars("loss").to_pydict()
    last_step = max(then["step"])
    writer = Writer(old_runs / name, OPTIONS, resume=True)
    assert writer.next_step == last_step + 1
    begin = writer.next_step if first_step is None else first_step
    if first_step is not None:
        writer.begin_attempt(first_step, after=writer.next_step)
    put_steps(writer, begin, 6)
    writer.close("finished", deadline_s=20)
    run = sonde.open(old_runs / name)
    assert json.loads((old_runs / name / "run.json").read_text())["format"] == 2
    assert run.attempts()["first_step"].to_pylist() == [0, begin]
    assert run.scalars("loss")["step"].to_pylist() == list(range(begin + 6))
    assert run.scalars("loss")["value"].to_pylist() == [*then["value"][:begin], *range(begin, begin + 6)]
    norms = run.stats("grad/0.weight/norm")
    assert norms["step"].to_pylist() == list(range(begin + 6))
    assert norms["value"].to_pylist()[begin:] == list(range(begin, begin + 6))
    assert run.attempt(0).scalars("loss").to_pydict() == then
    assert run.verify() == run.warnings == []


def put_steps(writer: Writer, begin: int, num_steps: int) -> None:
    """Sketches of norm n and a loss of n at step n."""
    (site,) = [id for (kind, name), id in writer._ids_by_name.items() if (kind, name) == ("grad", "0.weight")]
    loss = np.array([writer.scalar_id("loss")], np.int32)
    for step in range(begin, begin + num_steps):
        rows = empty_rows(1)
        rows[0, N], rows[0, SUMSQ] = 4, step**2
        writer.put(StatsRecord.without_hist(step, 0.0, np.array([site], np.int32), rows), 100, step=step)
        writer.put(ScalarsRecord(loss, np.array([step]), np.zeros(1), np.array([float(step)])), 50, step=step)
        writer.set_step(step + 1)


def test_numbers_logged_by_a_count_of_the_users_own_are_not_abandoned(old_runs):
    """Format 1 does not know at which step they were logged, so the run is continued without a new attempt."""
    path = old_runs / "finished"
    document = json.loads((path / "run.json").read_text())
    document["facts"]["logged_ahead"] = True
    document["heartbeat"]["step"] = 20  # twenty steps were counted, and numbers were logged up to 39
    del document["crc32"]
    (path / "run.json").write_text(json.dumps(document))
    then = sonde.open(path).scalars("loss")["value"].to_pylist()
    writer = Writer(path, OPTIONS, resume=True)
    writer.put(
        ScalarsRecord(np.array([writer.scalar_id("loss")], np.int32), np.array([99]), np.zeros(1), np.ones(1)),
        50,
        step=99,
    )
    writer.close("finished", deadline_s=20)
    run = sonde.open(path)
    assert run.num_attempts == 1
    assert run.scalars("loss")["value"].to_pylist() == [*then, 1.0]


def test_a_reader_of_format_1_refuses_a_run_of_format_2(tmp_path):
    """It would show abandoned rows among the others; the error names the remedy. Here: the next format."""
    from sonde.errors import FormatError
    from sonde.write.folder import create_run

    path = create_run(tmp_path / "runs", project="p", name="n")
    document = json.loads((path / "run.json").read_text())
    assert document["format"] == 2
    document.pop("crc32", None)
    (path / "run.json").write_text(json.dumps({**document, "format": FORMAT_VERSION + 1}))
    with pytest.raises(FormatError, match="pip install -U sonde-ml"):
        sonde.open(path)


def test_tables_of_the_old_catalog_gain_their_column(old_runs):
    Writer(old_runs / "resumed", OPTIONS, resume=True).close("finished", deadline_s=20)
    connection = sqlite3.connect(old_runs / "resumed" / "catalog.sqlite")
    assert connection.execute("select distinct attempt from events").fetchall()[0] == (0,)
    connection.close()


# ------------------------------------------------------------------------------------------------------- whole tensors


def written(step: int, *, store: str = "zarr") -> dict[str, HostTensor]:
    """What the earlier version was given."""
    tensors = drifting(step, size=300)
    tensors["optim/weight.exp_avg"] = drifting(step + 1, size=300)["param/weight"]
    tensors["param/counter"] = HostTensor.of(np.array(step, np.int64))
    tensors["param/empty"] = HostTensor.of(np.empty((0, 3), np.float32))
    if step < 3 and store == "zarr":
        values = np.repeat(np.arange(1025, dtype=np.float32), 4096).reshape(1025, 4096)  # a separate array
        tensors["param/large"] = HostTensor.of(values + np.float32(step) * 2**-10)
    if step == 3:
        tensors |= {name: tensor for name, tensor in awkward_tensors().items() if tensor.nbytes <= 240}
    if store == "icechunk":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(("custom", "no "))}
    return tensors


def assert_reads(reader: Any, step: int, tensors: dict[str, HostTensor]) -> None:
    assert set(reader.entries(step)) == set(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype != "complex32":
            assert reader.read(step, name).tobytes() == tensor.flat().tobytes(), (step, name)


def test_most_tensors_of_the_old_run_are_differences(old_tensors: Path) -> None:
    """Else this file tests nothing."""
    reader = open_tensor_store(old_tensors)
    bases = {step: reader.entries(step)["param/weight"].delta_of for step in reader.steps}
    assert bases == {0: None, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: None, 10: 9}


@pytest.mark.parametrize("store", ["zarr", pytest.param("icechunk", marks=pytest.mark.slow)])
def test_every_value_reads_as_it_was_written(unpacked_tensors: Path, store: str) -> None:
    reader = open_tensor_store(unpacked_tensors / store)
    assert reader.steps == STEPS
    for step in STEPS:
        assert_reads(reader, step, written(step, store=store))


def test_a_part_is_read_through_the_differences(old_tensors: Path) -> None:
    reader, large = open_tensor_store(old_tensors), written(2)["param/large"].values()
    assert np.array_equal(reader.read_part(2, "param/large", (slice(300, 700, 7), slice(5, 9))), large[300:700:7, 5:9])


def test_the_run_opens_and_is_exported(old_tensors: Path, tmp_path: Path) -> None:
    path = create_run(tmp_path / "runs", project="old", name=None, config={}, tags=(), notes="")
    Writer(path, WriterOptions()).close("finished")
    shutil.copytree(old_tensors, path, dirs_exist_ok=True)
    run = sonde.open(path)
    assert run.tensors.snapshots()["step"].to_pylist() == STEPS
    assert run.tensors.snapshot(7)["param/weight"].tobytes() == written(7)["param/weight"].flat().tobytes()
    assert run.tensors.get("param/weight").sel(step=10).values.tobytes() == written(10)["param/weight"].flat().tobytes()
    assert run.verify() == []


def test_a_continued_run_has_snapshots_of_both_formats(old_tensors: Path) -> None:
    store = open_store("zarr", old_tensors)
    store.write(Snapshot(11, 0.0, "", written(11)))
    store.write(Snapshot(1, 0.0, "", written(5)))  # was deleted; 2 stays the difference to the one that was here before
    store.close()
    reader = open_tensor_store(old_tensors)
    assert reader.steps == [0, 1, *STEPS[1:], 11]
    for step, tensors in ((1, written(5)), (2, written(2)), (10, written(10)), (11, written(11))):
        assert_reads(reader, step, tensors)


def test_a_step_taken_again_in_a_later_attempt_is_stored_next_to_the_old_one(old_tensors: Path) -> None:
    store = open_store("zarr", old_tensors)
    store.write(Snapshot(3, 0.0, "", written(5), attempt=1))
    with pytest.raises(RunError, match=r"cannot delete the snapshot of step 3"):
        store.delete(3)
    assert_reads(open_tensor_store(old_tensors), 3, written(5))
    store.delete(3, attempt=1)
    store.close()
    for step in STEPS:
        assert_reads(open_tensor_store(old_tensors), step, written(step))


def test_what_others_need_is_not_deleted(old_tensors: Path) -> None:
    store = open_store("zarr", old_tensors)
    with pytest.raises(
        RunError, match=r"delete .* step 3: .*stored step 4 as a difference from it\. Delete step 4 first"
    ):
        store.delete(3)
    for step in (7, 6, 5, 4, 3):
        store.delete(step)
    assert store.steps() == [0, 2, 8, 10]
    store.close()
    for step in (0, 2, 8, 10):
        assert_reads(open_tensor_store(old_tensors), step, written(step))


def damaged(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_never_a_number(old_tensors: Path) -> None:
    """In the tensor's own shard, and in the one that it is a difference to."""
    folder = old_tensors / "tensors/step-000000003"
    for path in [folder / "param.float32.delta/c/0", old_tensors / "tensors/step-000000002/param.float32.delta/c/0"]:
        data = path.read_bytes()
        for position in range(0, len(data), 37):
            damaged(path, position)
            with pytest.raises(CorruptError, match='tensor "param/weight" at step'):
                open_tensor_store(old_tensors).read(3, "param/weight")
            path.write_bytes(data)


def test_a_shard_cut_short_is_refused(old_tensors: Path) -> None:
    path = old_tensors / "tensors/step-000000008/grad.float32/c/0"
    data = path.read_bytes()
    for length in (0, 1, 19, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptError, match=r'tensor "grad/weight" at step 8'):
            open_tensor_store(old_tensors).read(8, "grad/weight")


def rewrite(run: Path, step: int, edit: Any) -> None:
    """Change a document and sign it again, as somebody with bad intentions would."""
    path = run / f"tensors/step-{step:09d}/zarr.json"
    group = json.loads(path.read_bytes())
    edit(group["attributes"]["sonde"])
    group["attributes"]["sonde_crc32"] = f"{_sum(group['attributes']['sonde']):08x}"
    path.write_text(json.dumps(group))


def test_differences_in_a_circle_are_refused(old_tensors: Path) -> None:
    rewrite(old_tensors, 3, lambda content: content["tensors"]["param/weight"].update(delta_of=3))
    with pytest.raises(CorruptError, match="form a cycle"):
        open_tensor_store(old_tensors).read(3, "param/weight")


def test_an_array_outside_the_snapshot_is_refused(old_tensors: Path) -> None:
    def edit(content: Any) -> None:
        content["arrays"]["../../../etc"] = content["arrays"].pop("grad.float32")
        content["tensors"]["grad/weight"]["array"] = "../../../etc"

    rewrite(old_tensors, 8, edit)
    with pytest.raises(CorruptError, match="damaged"):
        open_tensor_store(old_tensors).read(8, "grad/weight")


@pytest.mark.parametrize(
    "edit", [{"shape": [1 << 62]}, {"shape": [-1]}, {"shard_length": 0}, {"shard_length": 1 << 50}]
)
def test_an_array_that_cannot_be_is_refused(old_tensors: Path, edit: dict[str, Any]) -> None:
    rewrite(old_tensors, 8, lambda content: content["arrays"]["grad.float32"].update(edit))
    with pytest.raises(CorruptError):
        open_tensor_store(old_tensors).read(8, "grad/weight")


@pytest.mark.slow
def test_the_store_reads_from_the_old_repository_and_continues_it(unpacked_tensors: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(unpacked_tensors / "icechunk", tmp_path / "icechunk")
    store: Any = open_store("icechunk", copied, {"close_s": 120.0})
    for step in (2, 7, 10):
        found = store.read(step)
        for name, tensor in written(step, store="icechunk").items():
            assert found.tensors[name].flat().tobytes() == tensor.flat().tobytes(), (step, name)
    with pytest.raises(RunError, match=r"cannot delete the snapshot of .*step 3.*Delete step 4 first"):
        store.delete(3)
    store.write(Snapshot(11, 0.0, "", written(11)))
    assert store.drain(120)
    store.delete(10)
    store.close()
    reader = open_tensor_store(copied)
    assert reader.steps == [*STEPS[:-1], 11]
    for step in (2, 7):
        assert_reads(reader, step, written(step, store="icechunk"))
    assert_reads(reader, 11, written(11))


@pytest.mark.slow
def test_old_snapshots_that_wait_in_the_spool_are_uploaded_as_values(old_tensors: Path) -> None:
    """The far side gets plain arrays, whatever they were a difference to."""
    upload_file(old_tensors).write_bytes(UploadState("icechunk", "main", keeps_local=False).to_bytes())
    assert push(old_tensors).waiting == 0
    assert [path.name for path in (old_tensors / "tensors").iterdir()] == ["zarr.json"]
    reader = open_tensor_store(old_tensors)
    assert reader.steps == STEPS
    for step in STEPS:
        assert_reads(reader, step, written(step))
        assert reader.document(step).bases == set()


def test_a_document_of_format_1_says_so(old_tensors: Path) -> None:
    data = (old_tensors / "tensors/step-000000003/zarr.json").read_bytes()
    assert json.loads(data)["attributes"]["sonde"]["format"] == 1
    assert SnapshotDocument.from_bytes(data, "here").bases == {2}
