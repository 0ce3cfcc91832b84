"""Each level is the merge of the one below, whatever happened in between."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.schema.records import Site, StatsRecord
from sonde.schema.sketch import HIST_N, MAX, MIN, NUM_BINS, SUM, SUMSQ, N, empty_rows
from sonde.schema.stats import Sketch
from sonde.write.stats.parquet import read_stats
from sonde.write.stats.pyramid import Pyramid, merge_steps
from sonde.write.stats.table import sort_stats
from sonde.write.writer import Writer, WriterOptions


@pytest.fixture
def records():
    """Three sites, one of them measured at every third step, histograms now and then."""
    random = np.random.default_rng(0)
    made = []
    for step in range(3, 150):
        sites = np.array([5, 0, 2] if step % 3 == 0 else [5, 0], np.int32)
        rows = empty_rows(len(sites))
        rows[:, N] = 8
        rows[:, SUM], rows[:, SUMSQ] = random.normal(size=len(sites)), random.uniform(size=len(sites))
        rows[:, MIN], rows[:, MAX] = random.uniform(-2, -1, len(sites)), random.uniform(1, 2, len(sites))
        index = np.array([1] if step % 5 == 0 else [], np.int32)
        rows[index, HIST_N] = 8
        hist = random.integers(0, 9, (len(index), NUM_BINS)).astype(np.float32)
        made.append(StatsRecord(step, float(step), sites, rows, index, hist))
    return made


def by_hand(records, num_steps):
    """The same, one sketch at a time."""
    merged = {}
    for record in records:
        for i, site in enumerate(record.site_ids):
            at = np.flatnonzero(record.hist_index == i)
            hist = record.hist[at[0]].astype(np.float64) if len(at) else np.zeros(NUM_BINS)
            key = (int(site), record.step // num_steps * num_steps)
            merged[key] = merged.get(key, Sketch()) | Sketch(record.rows[i], hist)
    return merged


def check(table, expected):
    keys = list(zip(table.site.tolist(), table.step.tolist(), strict=True))
    assert keys == sorted(expected)
    hists = dict(zip(table.hist_row.tolist(), table.hist, strict=True))
    for i, key in enumerate(keys):
        np.testing.assert_allclose(table.rows[i], expected[key].rows, rtol=1e-12)
        np.testing.assert_array_equal(hists.get(i, np.zeros(NUM_BINS)), expected[key].hist)


@pytest.mark.parametrize("num_steps", [4, 16, 64, 1024])
def test_merged_rows_equal_sketches_merged_by_hand(records, num_steps):
    check(merge_steps([sort_stats(records)], num_steps), by_hand(records, num_steps))


@pytest.mark.parametrize("order", [1, -1])
def test_parts_in_any_order_merge_to_the_whole(records, order):
    parts = [sort_stats(records[:50]), sort_stats(records[50:71]), sort_stats(records[71:])]
    check(merge_steps(parts[::order], 16), by_hand(records, 16))


def record_run(run, records):
    writer = Writer(run, WriterOptions(flush_interval_s=60, seal_steps=8, system_interval_s=0))
    for i in range(6):
        writer.site_id(Site(kind="grad", name=str(i)))
    for record in records:
        writer.put(record, 1, step=record.step)
        if record.step % 8 == 0:
            assert writer.flush(20)
    writer.close("finished", deadline_s=20)


def levels(bench, run):
    found = {}
    for segment in bench.contents(run).segments:
        if segment["stream"] == "stats":
            found.setdefault(segment["level"], []).append(segment)
    return found


def test_a_run_has_levels_that_cover_it_from_the_start(bench, run, records):
    record_run(run, records)
    found = levels(bench, run)
    counts = {level: len(segments) for level, segments in found.items()}
    assert counts[1] == counts[0]
    assert counts[2] == counts[1] // 4
    assert counts[3] == counts[2] // 4
    for level, segments in found.items():
        last = -1
        for segment in segments:
            assert segment["first_sequence"] == last + 1
            last = segment["last_sequence"]
        tables = [read_stats(run / segment["file"]) for segment in segments]
        covered = [record for i, record in enumerate(records) if i <= last]
        check(merge_steps(tables, 4**level), by_hand(covered, 4**level))


def test_what_a_crash_left_out_is_made_when_the_run_resumes(bench, run, records, monkeypatch):
    grow = Pyramid.grow
    monkeypatch.setattr(Pyramid, "grow", lambda *arguments: None)
    record_run(run, records[:100])
    assert set(levels(bench, run)) == {0}
    monkeypatch.setattr(Pyramid, "grow", grow)
    writer = Writer(run, WriterOptions(system_interval_s=0), resume=True)
    for record in records[100:]:
        writer.put(record, 1, step=record.step)
    writer.close("finished", deadline_s=20)
    found = levels(bench, run)
    assert len(found[1]) == len(found[0])
    tables = [read_stats(run / segment["file"]) for segment in found[1]]
    check(merge_steps(tables, 4), by_hand(records, 4))
