from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sonde.read.run.steps import ALL_STEPS
from sonde.read.series.cut import thin
from sonde.read.series.pyramid import STEPS_PER_ROW, cover, is_intensive, read_overview
from sonde.run import Run
from sonde.schema.joined import JOINED
from sonde.schema.stats import STATS
from sonde.schema.thinning import min_max


def test_min_max_keeps_every_extreme_and_both_ends():
    values = np.sin(np.arange(10_000) / 50.0)
    values[1234], values[8765] = 40.0, -40.0
    kept = min_max(np.arange(10_000), values, 100)
    assert len(kept) <= 202
    assert {0, 1234, 8765, 9999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_min_max_keeps_the_first_value_of_a_nonfinite_stretch():
    values = np.ones(1000)
    values[500:520] = np.nan
    values[900] = np.inf
    kept = min_max(np.arange(1000), values, 10)
    assert {500, 900} <= set(kept.tolist())


@pytest.mark.parametrize("values", [np.full(1000, np.nan), np.ones(1000), np.empty(0), np.ones(3)])
def test_min_max_of_strange_series(values):
    kept = min_max(np.arange(len(values)), values, 10)
    assert len(kept) == min(len(values), len(kept))


def test_thinning_keeps_series_apart(finished):
    table = Run(finished.path).stats("grad/*/norm")
    thinned = thin(table, 5)
    assert thinned.num_rows < table.num_rows
    for site in ("0.weight", "0.bias"):
        whole, part = ([r for r in t.to_pylist() if r["site"] == site] for t in (table, thinned))
        assert max(r["value"] for r in whole) == max(r["value"] for r in part)
        assert all(row in whole for row in part)


def test_which_stats_survive_merging_over_steps():
    intensive = {name for name in (*STATS, *JOINED) if is_intensive(name)}
    assert {"mean", "rms", "abs_mean", "max", "zero_fraction", "ratio", "abs_q50"} <= intensive
    assert intensive.isdisjoint({"n", "sum", "sumsq", "norm", "norm_preclip", "nan"})


@pytest.fixture
def long_run(record):
    recording = record("long")
    for _ in range(10):
        recording.steps(16).flush()
    return recording.finish()


def test_a_level_of_the_pyramid_is_what_numpy_says_of_its_steps(long_run):
    state = Run(long_run.path)._state
    patterns = ["grad/0.bias/rms", "grad/0.bias/norm", "param/0.bias/max"]
    table = read_overview(state, patterns, ALL_STEPS, 1000, max_rows=100)
    bucket = int(table.schema.metadata[STEPS_PER_ROW])
    assert bucket in (4, 16)
    rows = {(row["stat"], row["step"]): row["value"] for row in table.to_pylist()}
    for start in range(0, 160, bucket):
        own = [long_run.tensors["grad", "0.bias", step] for step in range(start, start + bucket)]
        finite = np.concatenate([x[np.isfinite(x)] for x in own])
        assert rows["rms", start] == pytest.approx(np.sqrt((finite**2).mean()))
        mean_square = np.mean([(x[np.isfinite(x)] ** 2).sum() for x in own])
        assert rows["norm", start] == pytest.approx(np.sqrt(mean_square))
        largest = max(long_run.tensors["param", "0.bias", step].max() for step in range(start, start + bucket))
        assert rows["max", start] == largest
    assert len(rows) == 3 * len(range(0, 160, bucket))


def test_every_record_is_covered_once_at_every_level(long_run):
    state = Run(long_run.path)._state
    assert state.segments_of("stats", 1)
    for level in range(4):
        spans = sorted((s.first_sequence, s.last_sequence) for s in cover(state, level))
        assert spans[0][0] == 0
        assert all(a[1] + 1 == b[0] for a, b in pairwise(spans))
        assert spans[-1][1] == 159


def test_a_damaged_pyramid_is_not_needed(long_run):
    for path in (long_run.path / "pyramid").rglob("*.parquet"):
        path.write_bytes(b"nothing")
    run = Run(long_run.path)
    table = read_overview(run._state, "grad/0.weight/rms", ALL_STEPS, 1000, max_rows=10)
    assert table["step"].to_pylist() == list(range(160))
    assert any("pyramid" in warning for warning in run.warnings)


def test_an_overview_of_a_few_series_shows_every_step(long_run):
    table = Run(long_run.path).overview("grad/0.weight/norm", points=1000)
    assert table["step"].to_pylist() == list(range(160))
    assert table.schema.metadata[STEPS_PER_ROW] == b"1"
