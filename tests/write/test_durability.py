"""Killed at any moment, the run opens by itself and holds everything that was acknowledged."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from sonde.write.stats.catalog import Catalog
from sonde.write.writer import Writer, WriterOptions


def kill_campaign(bench, run: Path, quick: WriterOptions, seed: int) -> None:
    """Kill a writer somewhere, check, continue with another one, check again."""
    chance = random.Random(seed)
    child = bench.child("child_train.py", run, chance.choice([1, 3, 7]))
    assert child.stdout.readline() == "ready\n"
    time.sleep(chance.uniform(0.0, 0.6))
    child.send_signal(signal.SIGKILL)
    acknowledged = max([int(line) for line in child.stdout if line.endswith("\n")], default=-1)
    child.wait()

    found = bench.contents(run)
    bench.check_values(found)
    assert found.steps() >= set(range(acknowledged + 1))
    assert not found.holes()

    writer = Writer(run, quick, resume=True)
    assert writer.next_step == max(found.steps(), default=-1) + 1
    bench.put_steps(writer, range(writer.next_step, writer.next_step + 20))
    writer.close("finished", deadline_s=20)
    again = bench.contents(run)
    bench.check_values(again)
    assert again.steps() == set(range(writer.next_step + 20))
    assert not again.holes()
    assert found.sums.items() <= again.sums.items()


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_loses_nothing_acknowledged(bench, run, quick, seed):
    kill_campaign(bench, run, quick, seed)


@pytest.mark.fault
@pytest.mark.parametrize("seed", range(100, 125))
def test_kill_9_campaign(bench, run, quick, seed):
    kill_campaign(bench, run, quick, seed)


def crash_campaign(bench, folder: Path, quick: WriterOptions, first: int, stride: int) -> int:
    child = bench.child("child_crash_points.py", folder, first, stride)
    output, _ = child.communicate(timeout=800)
    last = int(output)
    for point in range(first, last + 1, stride):
        (run,) = (folder / str(point) / "project").iterdir()
        text = (folder / f"{point}.ack").read_text().strip()
        acknowledged = int(text) if text else -1
        found = bench.contents(run)
        bench.check_values(found)
        assert found.steps() >= set(range(acknowledged + 1)), point
        assert not found.holes(), point
        writer = Writer(run, quick, resume=True)
        bench.put_steps(writer, range(writer.next_step, writer.next_step + 3))
        writer.close("finished", deadline_s=20)
        again = bench.contents(run)
        assert found.sums.items() <= again.sums.items(), point
        assert again.steps() == set(range(writer.next_step + 3)), point
        assert not again.holes(), point
        assert not again.log_sequences
        assert not list(run.rglob("*.tmp"))
    return last


def test_a_crash_at_some_points_of_sealing_loses_nothing(bench, tmp_path, quick):
    assert crash_campaign(bench, tmp_path, quick, first=5, stride=61) > 100


@pytest.mark.fault
@pytest.mark.timeout(900)
def test_a_crash_at_any_point_of_sealing_loses_nothing(bench, tmp_path, quick):
    assert crash_campaign(bench, tmp_path, quick, first=0, stride=1) > 100


def test_ending_without_a_shutdown_keeps_what_was_acknowledged(bench, run):
    child = bench.child("child_train.py", run, 5)
    assert child.stdout.readline() == "ready\n"
    acknowledged = int(child.stdout.readline())
    child.send_signal(signal.SIGTERM)
    child.communicate()
    assert bench.contents(run).steps() >= set(range(acknowledged + 1))


def test_a_segment_without_a_catalog_row_is_replaced(bench, run, quick):
    leftover = run / "stats" / "rank-0000" / "seg-00000000.parquet"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half a segment")
    (leftover.parent / "seg-00000001.parquet.tmp").write_bytes(b"less")
    writer = Writer(run, quick)
    bench.put_steps(writer, range(30))
    writer.close("finished", deadline_s=20)
    assert bench.contents(run).steps() == set(range(30))
    assert not list(run.rglob("*.tmp"))


def test_sealing_syncs_before_it_names_and_names_before_it_forgets(bench, run, monkeypatch):
    """The order that survives a power loss; a killed process cannot show it, because the kernel keeps what it wrote."""
    calls = []

    def spy(owner, name, describe):
        real = getattr(owner, name)

        def call(*arguments):
            result = real(*arguments)
            calls.append((name, describe(*arguments)))
            return result

        monkeypatch.setattr(owner, name, call)

    writer = Writer(run, WriterOptions(flush_interval_s=60, system_interval_s=0))
    bench.put_steps(writer, range(3))
    assert writer.flush(20)
    folder = run / "stats" / "rank-0000"
    spy(os, "fsync", lambda fd: Path(os.readlink(f"/proc/self/fd/{fd}")))
    spy(os, "replace", lambda source, target: target)
    spy(Catalog, "commit", lambda catalog, rows: "segments" in next(iter(rows))[0])
    writer.close("finished", deadline_s=20)
    segment, log = folder / "seg-00000000.parquet", folder / "live.log"
    in_order = [
        ("fsync", folder / "seg-00000000.parquet.tmp"),
        ("replace", segment),
        ("fsync", folder),
        ("commit", True),
        ("fsync", folder / "live.log.tmp"),
        ("replace", log),
        ("fsync", folder),
    ]
    start = calls.index(in_order[0])
    assert calls[start : start + len(in_order)] == in_order
