"""A full disk, a failing disk and a slow disk cost records, which are counted, and nothing else."""

from __future__ import annotations

import errno
import json
import os
import threading
from queue import SimpleQueue

import pytest

from sonde.write.writer import Writer, WriterOptions

HELD = WriterOptions(flush_interval_s=0.01, queue_mib=0.05, flush_mib=0.01, system_interval_s=0)


@pytest.fixture
def stuck_disk(monkeypatch):
    """`fdatasync` does not return until released."""
    go_on, is_stuck = threading.Event(), threading.Event()
    real = os.fdatasync

    def fdatasync(fd):
        is_stuck.set()
        go_on.wait()
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    yield is_stuck, go_on
    go_on.set()


def test_a_full_disk_is_reported_once_counted_and_survived(bench, run):
    child = bench.child("child_full_disk.py", run)
    seen = json.loads(child.communicate(timeout=60)[0])

    assert seen["flushed"] == [True, False, True, True]
    assert "too large" in seen["degraded"][0]
    assert seen["degraded"][1] == ""
    assert len(seen["told"]) == 1
    assert seen["dropped_during"]["stats"] == 490 - seen["taken_during"] > 0
    found = bench.contents(run)
    bench.check_values(found)
    assert len(found.steps()) == 510 - seen["dropped"]["stats"]
    assert found.steps() >= {*range(10), *range(500, 510)}
    (gap,) = [event for event in found.events if event["type"] == "gap"]
    assert gap["severity"] == "warning"
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def test_a_log_that_failed_to_sync_is_left_and_its_frames_are_written_again(bench, run, quick, monkeypatch):
    told = []
    options = WriterOptions(flush_interval_s=0.01, heartbeat_s=0.05, system_interval_s=0)
    writer = Writer(run, options, on_warning=told.append)
    bench.put_steps(writer, range(5))
    assert writer.flush(20)
    real, failures = os.fdatasync, iter([True, False, True])

    def fdatasync(fd):
        if next(failures, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    bench.put_steps(writer, range(5, 10))
    assert writer.flush(20)
    names = {path.name for path in run.glob("*/rank-0000/*.log")}
    assert names == {"live.log", "live-00000001.log"}
    assert bench.contents(run).steps() == set(range(10))
    assert len(told) == 1
    assert not writer.degraded
    writer.close("finished", deadline_s=20)
    found = bench.contents(run)
    assert found.steps() == set(range(10))
    assert not found.log_sequences
    assert writer.dropped == {"stats": 0, "scalars": 0}


def test_put_never_waits_for_the_disk(bench, run, stuck_disk):
    is_stuck, go_on = stuck_disk
    writer = Writer(run, WriterOptions(flush_interval_s=0.01, system_interval_s=0))
    bench.put_steps(writer, range(1))
    is_stuck.wait()
    assert bench.put_steps(writer, range(1, 1000)) == 999  # a put that waited would never return
    assert not writer.flush(0.05)
    go_on.set()
    assert writer.flush(20)
    writer.close("finished", deadline_s=20)
    assert bench.contents(run).steps() == set(range(1000))


def test_nothing_is_acknowledged_before_the_disk_has_it(bench, run, stuck_disk):
    is_stuck, go_on = stuck_disk
    writer = Writer(run, WriterOptions(flush_interval_s=60, system_interval_s=0))
    bench.put_steps(writer, range(1))
    answers: SimpleQueue[bool] = SimpleQueue()
    flush = threading.Thread(target=lambda: answers.put(writer.flush(60)))
    flush.start()
    is_stuck.wait()
    flush.join(0.3)
    assert answers.empty()
    go_on.set()
    assert answers.get(timeout=60)
    flush.join()
    writer.close("finished", deadline_s=20)


def test_a_full_queue_drops_records_and_counts_them(bench, run, stuck_disk):
    is_stuck, go_on = stuck_disk
    writer = Writer(run, HELD)
    bench.put_steps(writer, range(1))
    is_stuck.wait()
    taken = bench.put_steps(writer, range(1, 1000))
    assert 0 < taken < 999
    assert writer.dropped["stats"] == 999 - taken
    go_on.set()
    assert writer.flush(20)
    bench.put_steps(writer, range(1000, 1001))
    writer.close("finished", deadline_s=20)
    found = bench.contents(run)
    bench.check_values(found)
    assert len(found.steps()) == taken + 2
    assert json.loads((run / "run.json").read_text())["heartbeat"]["dropped"] == writer.dropped
    assert [event["type"] for event in found.events] == ["dropped"]


def test_close_returns_at_its_deadline_even_if_the_disk_never_answers(bench, run, stuck_disk):
    is_stuck, go_on = stuck_disk
    writer = Writer(run, HELD)
    bench.put_steps(writer, range(1))
    is_stuck.wait()
    writer.close("finished", deadline_s=0.05)
    assert json.loads((run / "run.json").read_text())["status"] == "running"
    go_on.set()


def test_a_segment_that_cannot_be_written_leaves_the_log_whole(bench, run, quick, monkeypatch):
    told = []
    real = os.replace

    def replace(source, target):
        if str(target).endswith(".parquet"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    writer = Writer(run, quick, on_warning=told.append)
    bench.put_steps(writer, range(50))
    assert writer.flush(20)
    bench.put_steps(writer, range(50, 60))
    assert writer.flush(20)
    assert "sealing failed: Read-only file system" in writer.degraded
    assert not list(run.glob("stats/*/*.tmp"))
    assert bench.contents(run).steps() == set(range(60))
    monkeypatch.setattr(os, "replace", real)
    writer.close("finished", deadline_s=20)
    found = bench.contents(run)
    assert found.steps() == set(range(60))
    assert not found.log_sequences
    assert len(told) == 1
