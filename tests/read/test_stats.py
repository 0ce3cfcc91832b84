from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sonde.errors import UnknownNameError, UsageError
from sonde.read.run.segments import SegmentReader
from sonde.run import Run
from sonde.schema.joined import ALL_FIELDS, JOINED, fields_of
from sonde.schema.records import Site, StatsRecord
from sonde.schema.sketch import SUMSQ, N, empty_rows
from sonde.schema.stats import STATS
from sonde.write.writer import WriterOptions


def expected_stats(x: np.ndarray, *, raw: float = 1.0) -> dict[str, float]:
    """Plain numpy, from the tensor itself."""
    flat = x.ravel()
    good = flat[np.isfinite(flat)]
    return {
        "n": flat.size,
        "nan": np.isnan(flat).sum(),
        "inf": np.isinf(flat).sum(),
        "zero": (good == 0).sum(),
        "sum": good.sum(),
        "sumsq": (good**2).sum(),
        "sumabs": np.abs(good).sum(),
        "mean": good.mean(),
        "var": good.var(),
        "std": good.std(),
        "rms": np.sqrt((good**2).mean()),
        "norm": np.linalg.norm(good),
        "abs_mean": np.abs(good).mean(),
        "min": good.min(),
        "max": good.max(),
        "max_abs": np.abs(good).max(),
        "zero_fraction": (good == 0).sum() / flat.size,
        "nan_fraction": np.isnan(flat).mean(),
        "inf_fraction": np.isinf(flat).mean(),
        "nonfinite_fraction": (~np.isfinite(flat)).mean(),
        "rms_over_abs_mean": np.sqrt((good**2).mean()) / np.abs(good).mean(),
        "norm_preclip": raw * np.linalg.norm(good),
        "clip_factor": 1.0 / raw,
    }


def one(run: Run, series: str, step: int) -> float:
    table = run.stats(series, steps=step)
    assert table.num_rows == 1
    return float(table["value"][0].as_py())


@pytest.mark.parametrize("step", [0, 5, 39])
@pytest.mark.parametrize("site", ["0.weight", "0.bias"])
def test_every_stat_is_what_numpy_says_of_the_tensor(finished, site, step):
    run = Run(finished.path)
    expected = expected_stats(finished.tensors["grad", site, step], raw=2.0 if site == "0.weight" else 1.0)
    for stat, value in expected.items():
        assert one(run, f"grad/{site}/{stat}", step) == pytest.approx(value, rel=1e-12, abs=1e-15), stat


def test_every_registered_stat_is_checked_or_needs_a_histogram_or_an_optimizer():
    checked = set(expected_stats(np.ones(3)))
    rest = {name for name, stat in STATS.items() if name not in checked and not stat.needs_hist}
    assert rest == {"hist_n", "grad_update_dot", "grad_moment_dot", "second_moment_lag"}


def test_quantiles_of_magnitudes_are_right_to_the_width_of_a_bin(finished):
    run = Run(finished.path)
    magnitudes = np.abs(finished.tensors["grad", "0.weight", 4]).ravel()
    for percent in (25, 50, 75, 95):
        exact = np.quantile(magnitudes, percent / 100)
        assert exact / 2 <= one(run, f"grad/0.weight/abs_q{percent:02d}", 4) <= exact * 2


def test_stats_of_a_histogram_are_absent_where_none_was_taken(finished):
    steps = Run(finished.path).stats("grad/0.weight/abs_q50")["step"].to_pylist()
    assert steps == list(range(0, 40, 2))


def test_paired_stats_are_only_on_updates(finished):
    table = Run(finished.path).stats("*/*/grad_update_dot")
    assert set(table["kind"].to_pylist()) == {"update"}
    assert table.num_rows == 80


def test_joined_stats_are_what_numpy_says_of_both_tensors(finished):
    run, step, t = Run(finished.path), 7, finished.tensors
    update, param, grad = (t[kind, "0.weight", step] for kind in ("update", "param", "grad"))
    moment = t["optim", "0.weight.exp_avg", step]
    norm = np.linalg.norm
    assert one(run, "update/0.weight/ratio", step) == pytest.approx(norm(update) / norm(param))
    cosine = (grad * update).sum() / (norm(grad) * norm(update))
    assert one(run, "update/0.weight/grad_cosine", step) == pytest.approx(cosine)
    assert one(run, "update/0.weight/moment_cosine", step) == pytest.approx(0.5 / (norm(grad) * norm(moment)))


def test_long_table_has_the_documented_columns_and_types(finished):
    table = Run(finished.path).stats("grad/*/norm")
    words = pa.dictionary(pa.int32(), pa.string())
    assert table.schema.names == ["step", "kind", "site", "stat", "value"]
    assert [table.schema.field(name).type for name in table.schema.names] == [
        pa.int64(),
        words,
        words,
        words,
        pa.float64(),
    ]
    assert table.num_rows == 80
    assert list(table.to_pandas()["step"][:40]) == list(range(40))


def test_several_patterns_give_each_series_once(finished):
    table = Run(finished.path).stats(["grad/*/norm", "grad/0.weight/norm", "param/0.bias/rms"])
    assert table.num_rows == 120


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(3, 6), [3, 4, 5]),
        (slice(-3, None), [37, 38, 39]),
        (slice(None, 2), [0, 1]),
        (range(0, 40, 15), [0, 15, 30]),
        (7, [7]),
        (-1, [39]),
        (range(100, 200), []),
    ],
)
def test_steps_choose_rows(finished, steps, expected):
    assert Run(finished.path).stats("grad/0.weight/norm", steps=steps)["step"].to_pylist() == expected


def test_steps_that_count_down_are_refused(finished):
    with pytest.raises(UsageError, match="counts down"):
        Run(finished.path).stats("grad", steps=range(5, 0, -1))


@pytest.mark.parametrize(
    ("pattern", "nearest"), [("grad/0.weigth/norm", "0.weight"), ("grad/*/rsm", "rms"), ("gard/*/norm", "grad")]
)
def test_a_name_that_does_not_exist_is_answered_with_the_nearest(finished, pattern, nearest):
    with pytest.raises(UnknownNameError, match=f'Did you mean "{nearest}"'):
        Run(finished.path).stats(pattern)


def test_a_glob_that_matches_nothing_is_an_empty_table(finished):
    assert Run(finished.path).stats("act/*/norm").num_rows == 0


def test_sealed_and_live_rows_together_are_all_rows_once(record):
    recording = record().steps(20).flush().steps(5).flush()
    steps = Run(recording.path).stats("grad/0.weight/norm")["step"].to_pylist()
    assert steps == list(range(25))


def test_parts_of_one_sketch_are_merged(record):
    """Two records of the same step and site, as two ranks or repeated calls would write them."""
    recording = record().steps(3)
    recording.num_steps, recording.seed = 0, 1
    first = dict(recording.tensors)
    recording.steps(3).flush()
    whole = np.concatenate([first["param", "0.bias", 2].ravel(), recording.tensors["param", "0.bias", 2].ravel()])
    for path in ("live", "sealed"):
        assert one(Run(recording.path), "param/0.bias/std", 2) == pytest.approx(whole.std()), path
        recording.finish()


def test_a_stat_names_the_fields_it_reads():
    assert fields_of("sumsq") == {SUMSQ}
    assert N in fields_of("mean")
    assert all(fields_of(name) < ALL_FIELDS for name in (*STATS, *JOINED))


def test_fields_that_are_not_needed_do_not_change_a_stat(finished):
    """Reading some columns gives the same as reading all."""
    run = Run(finished.path)
    alone = {name: run.stats(f"update/*/{name}")["value"].to_numpy() for name in (*STATS, *JOINED)}
    together = run.stats("update")
    for name, values in alone.items():
        own = together.filter(pc.equal(together["stat"].cast(pa.string()), name))["value"].to_numpy()
        np.testing.assert_array_equal(values, own, err_msg=name)


def test_one_series_reads_only_its_tiles(record, monkeypatch):
    """A series is in one row group of the many a segment has."""
    recording = record("wide", options=WriterOptions(seal_steps=10_000))  # one segment, however slow the machine
    names = [f"layers.{number}.weight" for number in range(200)]
    ids = np.array([recording.writer.site_id(Site(kind="grad", name=name)) for name in names], np.int32)
    for step in range(600):
        rows = empty_rows(200)
        rows[:, N], rows[:, SUMSQ] = 1, step**2
        recording.writer.put(StatsRecord.without_hist(step, 0.0, ids, rows), rows.nbytes, step=step)
    recording.finish()
    read = []
    original = SegmentReader._read
    monkeypatch.setattr(SegmentReader, "_read", lambda *a: read.append((a[1], a[2])) or original(*a))
    values = Run(recording.path).stats("grad/layers.150.weight/norm")["value"].to_numpy()
    np.testing.assert_array_equal(values, np.arange(600.0))
    assert all(len(groups) == 1 for _, groups in read)
    assert any(len(segment.tiles) > 2 for segment, _ in read)
