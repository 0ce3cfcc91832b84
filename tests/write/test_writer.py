"""What is put is on disk, sorted and sealed; what cannot be put is counted."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from sonde.errors import CorruptError, FormatError, NotARunError, UsageError
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import FIELDS, MAX, MIN, NUM_BINS, SUM, SUMABS, SUMSQ, SUMSQ_RAW, ZERO, N, empty_rows
from sonde.write.recorder import MAX_EVENTS
from sonde.write.writer import Writer, WriterOptions


def read_file(run):
    return json.loads((run / "run.json").read_text())


def test_what_is_put_is_acknowledged_and_sealed(bench, run, quick):
    writer = Writer(run, quick)
    assert bench.put_steps(writer, range(100)) == 100
    assert writer.flush(20)
    assert bench.contents(run).steps() == set(range(100))
    writer.close("finished", deadline_s=20)
    found = bench.contents(run)
    bench.check_values(found)
    assert found.steps() == set(range(100))
    assert len(found.scalars) == 100
    assert not found.log_sequences
    assert found.sites == {i: f"layers.{i}.weight" for i in range(5)}
    assert found.names == {0: "loss"}


def test_resume_continues_sequences_steps_and_ids(bench, run, quick):
    for part in range(3):
        writer = Writer(run, quick, resume=part > 0)
        assert writer.next_step == part * 20
        assert writer.scalar_id(f"new in {part}") == part + (part > 0)
        bench.put_steps(writer, range(writer.next_step, writer.next_step + 20))
        writer.close("interrupted", reason="for a test", deadline_s=20)
    found = bench.contents(run)  # checks that the sequences of segments follow one another
    bench.check_values(found)
    assert found.steps() == set(range(60))
    assert found.names == {0: "new in 0", 1: "loss", 2: "new in 1", 3: "new in 2"}
    assert [event["type"] for event in found.events] == ["resumed", "resumed"]


def test_a_site_described_again_keeps_its_id(run, quick):
    writer = Writer(run, quick)
    first = writer.site_id(Site(kind="grad", name="a", shape=(2,)))
    assert writer.site_id(Site(kind="param", name="a", shape=(2,))) != first
    writer.close("finished", deadline_s=20)
    writer = Writer(run, quick, resume=True)
    assert writer.site_id(Site(kind="grad", name="a", shape=(3,))) == first
    writer.close("finished", deadline_s=20)
    writer = Writer(run, quick, resume=True)
    assert writer._recorder.sites[first].shape == (3,)
    writer.close("finished", deadline_s=20)


def test_a_function_is_called_on_the_writer_thread(bench, writer, run):
    writer.put(lambda: bench.stats_record(3), 100, step=3)
    writer.put(lambda: None, 100, step=4)
    writer.put(lambda: bench.scalars_record(5), 28, step=5, stream="scalars")
    assert writer.flush(20)
    found = bench.contents(run)
    assert found.steps() == {3}
    assert found.scalars == {(0, 5): 5 / 7}


def test_bad_records_are_counted_and_harm_no_other(bench, writer, run):
    good = bench.stats_record(0)
    writer.put(good, 1, step=0)
    writer.put(lambda: 1 / 0, 1, step=1)
    writer.put(StatsRecord(2, 0.0, good.site_ids, good.rows[:, :3], good.hist_index, good.hist), 1, step=2)
    writer.put(StatsRecord(3, 0.0, good.site_ids[:2], good.rows, good.hist_index, good.hist), 1, step=3)
    writer.put(StatsRecord(2**80, 0.0, good.site_ids, good.rows, good.hist_index, good.hist), 1, step=4)
    one = np.zeros(1)
    writer.put(ScalarsRecord(np.zeros(2, np.int32), np.zeros(1, np.int64), one, one), 1, step=5)
    writer.put("nonsense", 1, step=6)
    writer.put(bench.stats_record(7), 1, step=7)
    assert writer.flush(20)
    assert bench.contents(run).steps() == {0, 7}
    assert writer.dropped == {"stats": 5, "scalars": 1}
    assert not writer.degraded


def test_the_run_file_tells_how_the_run_is_doing(bench, run, quick, until):
    writer = Writer(run, quick)
    bench.put_steps(writer, range(10))
    writer.note(overhead=0.01, bad=float("nan"))
    until(lambda: read_file(run)["heartbeat"]["step"] >= 9)
    assert read_file(run)["status"] == "running"
    assert read_file(run)["ended_time"] is None
    writer.close("crashed", reason="ValueError: no", deadline_s=20)
    content = read_file(run)
    assert content["status"] == "crashed"
    assert content["reason"] == "ValueError: no"
    assert content["ended_time"] >= content["created_time"]
    assert content["heartbeat"]["acknowledged"]["stats"] == 9
    assert content["facts"] == {"overhead": 0.01, "bad": "nan"}
    assert content["environment"]["packages"]["numpy"] == np.__version__
    assert "git" in content


def test_a_closed_writer_takes_nothing_and_closes_once(bench, run, quick):
    writer = Writer(run, quick)
    writer.close("finished", deadline_s=20)
    writer.close("crashed", deadline_s=20)
    writer.event(Event(type="late", message="", step=0, time=0.0))
    writer.note(late=True)
    assert not writer.put(bench.stats_record(0), 1, step=0)
    assert writer.flush(1)
    assert read_file(run)["status"] == "finished"


def test_events_are_kept_up_to_a_number(run, quick, bench):
    writer = Writer(run, quick)
    for i in range(MAX_EVENTS + 10):
        writer.event(Event(type="skip", message=f"{i}", step=i, time=1.0, details={"a": float("inf")}))
    writer.close("finished", deadline_s=30)
    events = bench.contents(run).events
    assert len(events) == MAX_EVENTS
    assert events[0]["details"] == '{"a": "inf"}'


def test_a_warning_that_cannot_be_shown_does_not_stop_the_writer(bench, run, quick, monkeypatch, until):
    def refuse(message):
        raise RuntimeError("nobody listens")

    writer = Writer(run, quick, on_warning=refuse)
    monkeypatch.setattr("os.fdatasync", lambda fd: (_ for _ in ()).throw(OSError(5, "no")))
    bench.put_steps(writer, range(3))
    until(lambda: writer.degraded)
    monkeypatch.undo()
    assert writer.flush(20)
    writer.close("finished", deadline_s=20)
    assert bench.contents(run).steps() == {0, 1, 2}


def test_sealed_columns_are_as_documented(run, quick):
    writer = Writer(run, quick)
    for i in range(3):
        writer.site_id(Site(kind="act", name=str(i)))
    rows = empty_rows(3)
    rows[:2, N] = 4
    rows[0, MIN], rows[0, MAX] = -1.0, 2.0
    rows[1, SUMSQ_RAW] = 9.0
    hist = np.arange(NUM_BINS, dtype=np.float32)[None]
    record = StatsRecord(7, 12.5, np.array([2, 0, 1], np.int32), rows, np.array([0], np.int32), hist)
    writer.put(record, 1, step=7)
    writer.close("finished", deadline_s=20)
    table = pq.read_table(run / "stats/rank-0000/seg-00000000.parquet", page_checksum_verification=True)
    assert table.column_names == ["step", "site", *FIELDS, "hist", "time"]
    assert table["site"].to_pylist() == [0, 1, 2]
    assert table["min"].to_pylist() == [None, None, -1.0]
    assert table["max"].to_pylist() == [None, None, 2.0]
    assert table["sumsq_raw"].to_pylist() == [9.0, None, None]
    assert table["grad_update"].to_pylist() == [None] * 3
    assert table["hist"].to_pylist() == [None, None, hist[0].tolist()]
    assert table["time"].to_pylist() == [12.5] * 3


def test_a_sealed_row_takes_at_most_forty_bytes(run):
    """Realistic rows: sums with noise in every bit of their mantissas, extremes of float32 tensors."""
    num_sites, num_steps = 100, 512
    random = np.random.default_rng(0)
    numel = random.integers(100, 1_000_000, num_sites).astype(np.float64)
    scale = 10.0 ** random.uniform(-4, 0, num_sites)
    writer = Writer(run, WriterOptions(system_interval_s=0))
    ids = np.array([writer.site_id(Site(kind="grad", name=str(i))) for i in range(num_sites)], np.int32)
    for step in range(num_steps):
        scale *= np.exp(random.normal(0, 0.05, num_sites))
        rows = empty_rows(num_sites)
        rows[:, N], rows[:, ZERO] = numel, random.integers(0, 3, num_sites)
        rows[:, SUM] = random.normal(size=num_sites) * scale * np.sqrt(numel)
        rows[:, SUMSQ] = numel * scale**2 * random.uniform(0.9, 1.1, num_sites)
        rows[:, SUMABS] = numel * scale * random.uniform(0.7, 0.9, num_sites)
        rows[:, MIN] = (-scale * random.uniform(3, 4, num_sites)).astype(np.float32)
        rows[:, MAX] = (scale * random.uniform(3, 4, num_sites)).astype(np.float32)
        rows[::4, SUMSQ_RAW] = rows[::4, SUMSQ] * random.uniform(1, 2, num_sites // 4)
        rows[1::4, 10:13] = random.normal(size=(num_sites // 4, 3))
        writer.put(StatsRecord.without_hist(step, time.time(), ids, rows), rows.nbytes, step=step)
    writer.close("finished", deadline_s=30)
    size = sum(path.stat().st_size for path in run.glob("stats/*/*.parquet"))
    assert size / (num_sites * num_steps) <= 40


def test_a_folder_that_is_not_a_run_is_refused(tmp_path, quick):
    with pytest.raises(NotARunError, match=r"run\.json"):
        Writer(tmp_path, quick)


def test_a_run_of_a_newer_format_is_refused(run, quick):
    (run / "run.json").write_text('{"format": 99}')
    with pytest.raises(FormatError, match="format 99"):
        Writer(run, quick)


def test_a_damaged_catalog_is_refused(bench, run, quick):
    writer = Writer(run, quick)
    bench.put_steps(writer, range(3))
    writer.close("finished", deadline_s=20)
    path = run / "catalog.sqlite"
    path.write_bytes(path.read_bytes().replace(b"layers.1.weight", b"layers.7.weight"))
    with pytest.raises(CorruptError, match="row 1 of table sites"):
        Writer(run, quick, resume=True)
    path.write_bytes(b"this is no database at all" * 400)
    with pytest.raises(CorruptError, match="damaged"):
        Writer(run, quick, resume=True)


@pytest.mark.parametrize(("name", "value"), [("flush_interval_s", 0), ("queue_mib", -1), ("rank", -1)])
def test_bad_options_are_refused(name, value):
    with pytest.raises(UsageError, match=name):
        WriterOptions(**{name: value})


def test_making_a_writer_imports_neither_torch_nor_pyarrow():
    code = (
        "import sys, sonde.write.writer, sonde.write.folder; print({'torch', 'pyarrow', 'duckdb'} & set(sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "set()\n"
