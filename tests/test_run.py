"""`open`, `runs`, `compare` and `Run` as a user meets them, on runs made by the real writer."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import sonde
from sonde.run import MOVED_TO_TENSORS, Table
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import SUMSQ, N, empty_rows
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.folder import create_run
from sonde.write.tensors.store import open_store
from sonde.write.writer import Writer, WriterOptions


def write(
    name: str = "baseline", *, steps: int = 30, diverge_at: int | None = None, by: float = 0.1, **facts: Any
) -> Path:
    """Norm of grad/0.weight is step + 1, loss is 1 / (step + 1); both change `by` that much from `diverge_at` on."""
    path = create_run(Path("runs"), project="gpt", name=name, **facts)
    writer = Writer(path, WriterOptions(flush_interval_s=0.02, seal_steps=10, system_interval_s=0.0))
    site = np.array([writer.site_id(Site(kind="grad", name="0.weight", shape=(1,)))], np.int32)
    loss = np.array([writer.scalar_id("<b>loss</b>")], np.int32)
    for step in range(steps):
        factor = 1.0 + (by if diverge_at is not None and step >= diverge_at else 0.0)
        rows = empty_rows(1)
        rows[0, N], rows[0, SUMSQ] = 1, ((step + 1) * factor) ** 2
        writer.put(StatsRecord.without_hist(step, 0.0, site, rows), 200, step=step)
        scalars = ScalarsRecord(loss, np.array([step]), np.array([1e9 + step]), np.array([factor / (step + 1)]))
        writer.put(scalars, 50, step=step)
    writer.event(Event(type="note", message="half way", step=steps // 2, time=1e9))
    writer.note(coverage={"never_fired": ["head"]})
    writer.close("finished")
    return path


def test_a_run_says_what_it_is():
    run = sonde.open(write(config={"lr": 0.1}, tags=["a", "b"], notes="first try"))
    assert (run.name, run.project, run.status, run.reason, run.last_step) == ("baseline", "gpt", "finished", "", 29)
    assert (dict(run.config), run.tags, run.notes) == ({"lr": 0.1}, ("a", "b"), "first try")
    assert run.environment["python"]
    assert run.created.tzinfo is not None
    assert run.warnings == []
    assert run.coverage() == {"never_fired": ["head"]}
    assert run.events()["message"].to_pylist() == ["half way"]
    assert run.sites("grad").to_pylist()[0]["site"] == "0.weight"
    assert run.system().schema.names == ["time", "step", "name", "value"]
    assert run.scalars().schema.names == ["step", "name", "value", "time"]


def test_scalars_are_every_logged_value_in_order():
    table = sonde.open(write()).scalars("*loss*", steps=slice(-5, None))
    assert table["step"].to_pylist() == [25, 26, 27, 28, 29]
    assert table["value"].to_pylist() == [1 / (step + 1) for step in range(25, 30)]


def test_a_run_shows_itself_in_a_terminal():
    out = io.StringIO()
    Console(file=out, width=100, no_color=True).print(sonde.open(write(notes="[red]\x1b[31mnot a colour")))
    text = out.getvalue()
    assert "gpt/baseline" in text
    assert "█" in text
    assert "<b>loss</b>" in text
    assert "[red]\\x1b[31mnot a colour" in text
    assert "\x1b" not in text


def test_a_run_shows_itself_in_a_notebook_with_everything_escaped():
    html = sonde.open(write(notes="<script>alert(1)</script>", tags=['"><img src=x onerror=alert(1)>']))._repr_html_()
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;b&gt;loss&lt;/b&gt;" in html
    assert "http" not in html


def test_compare_finds_the_planted_divergence():
    a, b = (
        write("a", config={"lr": 0.1, "optim": {"beta": 0.9}}),
        write("b", diverge_at=17, config={"lr": 0.2, "optim": {"beta": 0.9}, "seed": 3}),
    )
    found = sonde.compare(a, b)
    assert found.config.to_pylist() == [{"key": "lr", "a": "0.1", "b": "0.2"}, {"key": "seed", "a": None, "b": "3"}]
    rows = {row["series"]: row for row in found.divergence.to_pylist()}
    assert set(rows) == {"<b>loss</b>", "grad/0.weight/norm"}
    assert all(row["step"] == 17 and row["num_steps"] == 30 for row in rows.values())
    assert rows["grad/0.weight/norm"]["a"] == 18.0
    assert found.first_divergence.step == 17
    (metric,) = found.metrics.to_pylist()
    assert metric["difference"] == pytest.approx(0.1 / 30)


def test_runs_that_differ_by_rounding_do_not_diverge():
    found = sonde.compare(write("a"), write("b", diverge_at=5, by=1e-7))
    assert found.first_divergence is None
    assert found.tolerance == 1e-5
    assert sonde.compare("gpt/a", "gpt/b", tolerance=1e-9).first_divergence.step == 5


def test_a_run_that_became_nan_diverges_there():
    found = sonde.compare(write("a"), write("b", diverge_at=9, by=np.nan))
    assert found.first_divergence.step == 9
    assert sonde.compare("gpt/b", "gpt/b").first_divergence is None


def test_series_of_one_run_only_are_named():
    found = sonde.compare(write("a", steps=0), write("b"))
    assert (found.only_a, found.only_b) == ((), ("<b>loss</b>", "grad/0.weight/norm"))
    out = io.StringIO()
    Console(file=out, width=100).print(found)
    assert "No series differs" in out.getvalue()


def test_looking_at_a_run_imports_neither_torch_nor_a_query_engine():
    path = write()
    code = f"""
import sys, sonde
run = sonde.open({str(path)!r})
run.stats("grad"), run.scalars(), run.status, run.warnings, sonde.runs("runs"), sonde.compare(run, run)
assert not {{"torch", "duckdb", "rich", "typer"}} & set(sys.modules), sorted(sys.modules)
run.sql("select 1")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_finished_run_can_be_read_from_a_folder_that_cannot_be_written(tmp_path):
    path = write()
    for folder in (path, *path.rglob("*")):
        folder.chmod(0o555 if folder.is_dir() else 0o444)
    try:
        run = sonde.open(path)
        assert run.stats("grad/*/norm").num_rows == 30
    finally:
        for folder in (path, *path.rglob("*")):
            folder.chmod(0o755)


def test_a_held_run_answers_from_one_moment(tmp_path):
    path = create_run(tmp_path, project="gpt", name="live")
    writer = Writer(path, WriterOptions(flush_interval_s=0.02, system_interval_s=0.0))
    loss = np.array([writer.scalar_id("loss")], np.int32)

    def log(step: int) -> None:
        writer.put(ScalarsRecord(loss, np.array([step]), np.array([1e9]), np.array([0.5])), 50, step=step)
        assert writer.flush(10.0)

    log(0)
    run = sonde.open(path)
    with run.hold():
        before = run.revision
        log(1)
        assert (run.last_step, run.scalars().num_rows, run.revision) == (0, 1, before)
    assert (run.last_step, run.scalars().num_rows) == (1, 2)
    assert run.revision != before
    writer.close("finished")


def test_lines_are_series_as_arrays():
    run = sonde.open(write())
    steps, values = run.lines("grad/*/norm")["grad/0.weight/norm"]
    assert steps.tolist() == list(range(30))
    assert values.tolist() == [float(step + 1) for step in range(30)]
    thin, _ = run.lines("grad/*/norm", points=3)["grad/0.weight/norm"]
    assert 2 <= len(thin) <= 8
    assert run.lines("grad/*/norm", steps=range(3, 5))["grad/0.weight/norm"][0].tolist() == [3, 4]
    assert run.scalar_lines(steps=slice(-2, None))["<b>loss</b>"][0].tolist() == [28, 29]


def test_an_exact_name_is_not_a_pattern():
    run = sonde.open(write())
    assert run.scalars("<b>loss</b>", exact=True).num_rows == 30
    assert run.scalars(["*loss*", "never logged"], exact=True).num_rows == 0


def test_every_table_of_a_run_shows_itself():
    run = sonde.open(write())
    tables = {
        "stats": run.stats("*"),
        "overview": run.overview("*"),
        "scalars": run.scalars(),
        "exact": run.scalars("loss", exact=True),
        "snapshots": run.tensors.snapshots(),
        "sql": run.sql("select 1 as one"),
        **{
            name: getattr(run, name)()
            for name in ("attempts", "sites", "events", "system", "health", "live_findings", "checkpoints")
        },
    }
    for name, table in tables.items():
        assert isinstance(table, Table), name
        assert repr(table).startswith("Table: "), name
        assert "sonde-card" in table._repr_html_(), name


OLD = {
    "tensor": lambda run: run.tensor("param/0.weight").values.tolist(),
    "snapshot": lambda run: run.snapshot(0)["param/0.weight"].tolist(),
    "snapshots": lambda run: run.snapshots().to_pylist(),
    "tensor_store": lambda run: run.tensor_store(local=True).steps,
    "lake": lambda run: run.lake().steps,
    "num_snapshots": lambda run: run.num_snapshots,
    "version": lambda run: run.version().tensors.snapshots().to_pylist(),
}
NEW = {
    "tensor": lambda run: run.tensors.get("param/0.weight").values.tolist(),
    "snapshot": lambda run: run.tensors.snapshot(0)["param/0.weight"].tolist(),
    "snapshots": lambda run: run.tensors.snapshots().to_pylist(),
    "tensor_store": lambda run: run.tensors.store(local=True).steps,
    "lake": lambda run: run.tensors.store().steps,
    "num_snapshots": lambda run: run.tensors.num_snapshots,
    "version": lambda run: run.tensors.version().snapshots().to_pylist(),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    path = create_run(tmp_path_factory.mktemp("kept"), project="p", name="n", config={}, tags=(), notes="")
    writer = Writer(path, WriterOptions())
    store = open_store("zarr", path)
    for step in range(2):
        store.write(Snapshot(step, 1.0, "test", {"param/0.weight": HostTensor.of(np.full((2, 3), step, np.float32))}))
    store.close()
    writer.close("finished")
    return sonde.open(path)


def test_the_table_of_moved_methods_is_tested():
    assert OLD.keys() == NEW.keys() == MOVED_TO_TENSORS.keys()


@pytest.mark.parametrize("name", OLD)
def test_old_names_of_tensor_methods_work_and_name_the_new_one(kept, name):
    with pytest.warns(
        DeprecationWarning, match=rf"run\.{name} is now run\.tensors\.{MOVED_TO_TENSORS[name]}$"
    ) as given:
        found = OLD[name](kept)
    assert found == NEW[name](kept)
    assert given[0].filename == __file__
    assert name not in dir(kept)


def test_unknown_attributes_of_a_run_are_errors(kept):
    with pytest.raises(AttributeError, match="'Run' object has no attribute 'snapshotz'"):
        _ = kept.snapshotz
