"""What the monitor knows: only what is new is read, a NaN never hides, and a run that died is said to be dead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sonde
from sonde.errors import RunNotFoundError
from sonde.show.monitor.frame import worst_layers
from sonde.show.monitor.reading import Reading, throughput
from sonde.show.monitor.target import Target, find_target
from sonde.show.monitor.watching import WatchedRuns
from sonde.show.pooled import LivePool, Pooled, pool


def falling(step: int) -> float:
    return 3.0 / (1 + step)


def long_table(rows: list[tuple[int, str, float]], stat: str = "rms") -> pa.Table:
    steps, sites, values = zip(*rows, strict=True)
    words = {
        name: pa.array(column).dictionary_encode()
        for name, column in (("kind", ["grad"] * len(rows)), ("site", sites), ("stat", [stat] * len(rows)))
    }
    return pa.table({"step": pa.array(steps, pa.int64()), **words, "value": pa.array(values, pa.float64())})


# ----------------------------------------------------------------------------------------------------------- live pool


def test_pool_filled_step_by_step_is_the_pool_of_the_whole(begin: Any) -> None:
    recording = begin()
    live = LivePool("rms", 16)
    run = None
    for _ in range(5):
        recording.steps(9, falling, nan_at=20).flush()
        run = sonde.open(recording.path)
        first = max(recording.step - 12, 0)  # some steps twice: that must change nothing
        table = run.stats(["grad/*/rms", "grad/*/nonfinite_fraction"], steps=range(first, recording.step))
        live.add(table, [f"grad/{name}" for name in recording.layers])
    assert run is not None
    found = live.pooled()
    assert found.steps_per_column == 4  # 45 steps in 16 columns
    whole = pool(run, "grad/*/rms", width=45)
    for column in range(found.values.shape[1]):
        inside = whole.values[:, 4 * column : 4 * column + 4]
        np.testing.assert_allclose(found.values[:, column], inside.max(axis=1))
    assert np.argwhere(found.is_odd).tolist() == [[found.sites.index("grad/layers.1.weight"), 5]]


def test_pool_of_a_long_run_stays_small() -> None:
    live = LivePool("rms", 8)
    for step in range(0, 1_000, 7):
        live.add(long_table([(step, "a", float(step == 490))]))
    found = live.pooled()
    assert found.values.shape[1] <= 8
    assert found.values.max() == 1.0


def test_site_that_appears_late_gets_a_separate_row() -> None:
    live = LivePool("rms", 8)
    live.add(long_table([(0, "a", 1.0)]))
    live.add(long_table([(1, "b", 2.0), (1, "a", 3.0)]))
    found = live.pooled()
    assert found.sites == ("grad/a", "grad/b")
    np.testing.assert_array_equal(found.values, [[1.0, 3.0], [np.nan, 2.0]])


# ------------------------------------------------------------------------------------------------------------- reading


def test_second_look_reads_only_the_new_steps(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = begin().steps(100, falling).flush()
    reading = Reading(sonde.open(recording.path))
    reading.look()
    asked: list[Any] = []
    real = sonde.Run.stats
    monkeypatch.setattr(sonde.Run, "overview", lambda *a, **k: pytest.fail("read from the start again"))
    monkeypatch.setattr(sonde.Run, "stats", lambda run, p, *, steps: asked.append(steps) or real(run, p, steps=steps))
    reading.look()
    assert asked == []
    recording.steps(3, falling).flush()
    reading.look()
    assert [(steps.start, steps.stop) for steps in asked] == [(83, 103)]
    frame = reading.frame()
    assert frame.run is not None
    assert (frame.run.last_step, frame.losses[0].name, len(frame.losses[0].steps)) == (102, "loss", 103)


def test_validation_logged_late_is_still_seen(begin: Any) -> None:
    recording = begin().steps(11, falling, val=lambda step: 1.0 + step).flush()
    reading = Reading(sonde.open(recording.path))
    reading.look()
    frame = reading.frame()
    assert [curve.name for curve in frame.losses] == ["loss", "val/loss", "lr"]
    assert frame.losses[1].values.tolist() == [1.0, 6.0, 11.0]


def test_long_curve_is_thinned_and_keeps_its_spike(begin: Any) -> None:
    reading = Reading(sonde.open(begin().steps(1, falling).flush().path))
    column = {step: (100.0 if step == 7777 else 1.0, float(step)) for step in range(20_000)}
    reading.scalars["loss"] = column
    reading._keep_few("loss", column)
    assert len(reading.scalars["loss"]) < 5000
    assert reading._thin["loss"].values.max() == 100.0


def test_run_that_ended_is_judged_by_all_rules_once(begin: Any) -> None:
    run = sonde.open(begin().steps(60, falling, nan_at=30).finish())
    reading = Reading(run)
    reading.look()
    assert not reading.frame().is_judged
    assert reading.is_worth_judging()
    reading.judge()
    assert reading.frame().is_judged
    assert not reading.is_worth_judging()
    assert "nan_inf" in [finding["rule"] for finding in reading.frame().findings]


def test_folder_that_is_deleted_meanwhile_is_said(begin: Any) -> None:
    import shutil

    recording = begin().steps(3, falling)
    path = recording.finish()
    reading = Reading(sonde.open(path))
    reading.look()
    shutil.rmtree(path)
    reading.look()
    assert reading.frame().problem


def test_throughput() -> None:
    curve = throughput(np.arange(11), np.arange(11) / 4.0)
    assert curve is not None
    assert curve.values.tolist() == [4.0] * 10
    assert throughput(np.arange(1), np.zeros(1)) is None
    assert throughput(np.arange(5), np.zeros(5)) is None


def test_layers_that_stand_out_come_first() -> None:
    values = np.array([[1.0, 1.0], [1.0, 1000.0], [1.0, 0.5], [1.0, 1.0], [2.0, 1.0]])
    values[3, 1] = np.inf
    worst = worst_layers(Pooled(("grad/a", "grad/b", "grad/c", "grad/d", "grad/e"), 10, 5.0, values))
    assert [one.site for one in worst[:3]] == ["grad/d", "grad/b", "grad/c"]
    assert (worst[0].odd_step, worst[1].odd_step) == (15, None)
    assert worst[1].times_median == 1000.0


# -------------------------------------------------------------------------------------------------------- which runs


def test_newest_run_that_runs_is_shown_until_another_is_chosen(begin: Any) -> None:
    old = begin("old").steps(2, falling).finish()
    live = begin("live").steps(2, falling).flush()
    watching = WatchedRuns(Target(old.parents[1]))
    frame = watching.look()
    assert frame.run is not None
    assert (frame.run.name, frame.run.status, len(frame.runs)) == ("live", "running", 2)
    watching.choose(str(old))
    frame = watching.look()
    assert frame.run is not None
    assert frame.run.name == "old"
    live.finish()


def test_without_a_run_it_waits_and_says_what_to_do(begin: Any, tmp_path: Path) -> None:
    watching = WatchedRuns(find_target(None, tmp_path / "runs"))
    frame = watching.look()
    assert frame.run is None
    assert "sonde run train.py" in frame.problem
    begin().steps(1, falling).flush()
    assert watching.look().run is not None


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step-000000002"])
def test_folder_of_checkpoints_means_its_run(begin: Any, place: str) -> None:
    path = begin().steps(2, falling).finish()
    (path / place).mkdir(parents=True, exist_ok=True)
    assert find_target(str(path / place), Path("elsewhere")).only == path


def test_places_and_names(begin: Any, tmp_path: Path) -> None:
    path = begin().steps(2, falling).finish()
    assert find_target(str(tmp_path / "runs"), Path("elsewhere")) == Target(tmp_path / "runs")
    assert find_target(str(tmp_path), Path("elsewhere")) == Target(tmp_path / "runs")
    assert find_target("gpt/baseline", tmp_path / "runs").only == path
    assert find_target("./not-there-yet", Path("runs")) == Target(Path("not-there-yet"))
    with pytest.raises(RunNotFoundError, match="baseline"):
        find_target("gpt/baselin-e", tmp_path / "runs")


@pytest.mark.fault
def test_killed_run_is_marked_at_the_next_look(tmp_path: Path) -> None:
    program = """
import sys, time
from pathlib import Path
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions
writer = Writer(create_run(Path(sys.argv[1]), project="gpt", name="killed"), WriterOptions())
writer.set_step(3)
writer.flush(10.0)
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "runs")], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        watching = WatchedRuns(Target(tmp_path / "runs"))
        frame = watching.look()
        assert frame.run is not None
        assert frame.run.status == "running"
        os.kill(child.pid, 9)
        child.wait(10)
        frame = watching.look()
        assert frame.run is not None
        assert (frame.run.status, frame.runs[0].status) == ("crashed", "crashed")
        assert "killed" in frame.reason
