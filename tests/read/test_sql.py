from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sonde.errors import QueryError, SondeError, UsageError
from sonde.read.series.sql import TRUNCATED, run_query
from sonde.read.series.views import VIEWS
from sonde.run import Run

FORBIDDEN = [
    "select * from read_csv('/etc/passwd')",
    "select * from read_csv_auto('/etc/passwd')",
    "select * from read_text('/etc/passwd')",
    "select * from read_blob('/etc/passwd')",
    "select * from read_parquet('{run}/scalars/rank-0000/seg-00000000.parquet')",
    "select * from read_json('{run}/run.json')",
    "select * from '/etc/passwd'",
    "select * from '{run}/run.json'",
    "select * from glob('/*')",
    "select * from glob('{run}/*')",
    "select * from sniff_csv('/etc/passwd')",
    "select * from parquet_metadata('{run}/scalars/rank-0000/seg-00000000.parquet')",
    "select * from query('copy (select 1) to ''{out}''')",
    "copy (select 1) to '{out}'",
    "copy stats to '{out}' (format parquet)",
    "export database '{out}'",
    "import database '{out}'",
    "attach '{out}' as other",
    "attach '{run}/catalog.sqlite' (type sqlite)",
    "install httpfs",
    "load httpfs",
    "load '{out}'",
    "set threads = 1",
    "set enable_external_access = true",
    "set lock_configuration = false",
    "reset enable_external_access",
    "pragma threads = 1",
    "pragma enable_external_access = true",
    "pragma database_list",
    "create table t as select 1",
    "create macro f() as 1",
    "create secret (type s3)",
    "drop view stats",
    "insert into stats select * from stats",
    "delete from scalars",
    "update scalars set value = 0",
    "explain analyze copy (select 1) to '{out}'",
    "select 1; copy (select 1) to '{out}'",
    "prepare p as select 1",
    "call pragma_version()",
    "checkpoint",
    "vacuum",
    "begin transaction",
    "select * from state",
    "select * from connection",
    "select getenv('HOME')",
    "",
    ";",
]


@pytest.mark.parametrize("query", FORBIDDEN)
def test_a_query_cannot_leave_its_run(finished, tmp_path, query):
    out = tmp_path / "out"
    before = {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")}
    with pytest.raises(QueryError):
        Run(finished.path).sql(query.format(run=finished.path, out=out))
    assert not out.exists()
    assert before == {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")}


def test_settings_are_shut_before_the_query_runs(finished):
    shut = ("enable_external_access", "autoload_known_extensions", "autoinstall_known_extensions")
    rows = Run(finished.path).sql("select name, value from duckdb_settings()").to_pylist()
    values = {row["name"]: row["value"] for row in rows}
    assert {values[name] for name in shut} == {"false"}
    assert values["lock_configuration"] == "true"
    assert values["python_enable_replacements"] == "false"
    assert values["temp_directory"] == ""


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_has_the_columns_it_says(finished, name):
    table = Run(finished.path).sql(f"select * from {name}")
    assert tuple(table.schema.names) == VIEWS[name].columns


def test_wide_stats_are_those_of_the_long_table(finished):
    run = Run(finished.path)
    query = "select step, norm, mean, ratio from stats where kind = 'update' and site = '0.bias' order by step"
    wide = run.sql(query).to_pydict()
    for stat in ("norm", "mean", "ratio"):
        assert wide[stat] == run.stats(f"update/0.bias/{stat}")["value"].to_pylist()


def test_what_was_not_measured_is_null(finished):
    run = Run(finished.path)
    assert run.sql("select count(abs_q50) c, count(*) n from stats").to_pylist() == [{"c": 160, "n": 320}]
    assert run.sql("select count(*) n from stats where ratio is not null").to_pylist() == [{"n": 80}]


def test_queries_as_layerclaw_wrote_them_work(finished):
    run = Run(finished.path)
    rows = run.sql(
        """select r.project_name, r.run_name, r.total_steps, c.step, c.metrics, g.layer_name, g.num_infs
           from runs r join checkpoints c on c.run_id = r.run_id
           join gradient_stats g on g.checkpoint_id = c.checkpoint_id
           where g.num_nans > 0"""
    ).to_pylist()
    assert len(rows) == 1
    assert (rows[0]["step"], rows[0]["layer_name"], rows[0]["num_infs"]) == (5, "0.bias", 2)
    assert (rows[0]["project_name"], rows[0]["run_name"], rows[0]["total_steps"]) == ("gpt", "baseline", 40)
    assert json.loads(rows[0]["metrics"])["loss"] == finished.losses[5]
    (system,) = run.sql("select cpu_percent, memory_percent, gpu_metrics from system_metrics").to_pylist()[:1]
    assert system["memory_percent"] > 0
    assert run.sql("select anomaly_type, severity, details from anomalies").num_rows == 0


def test_an_answer_has_at_most_the_limit_and_says_that_it_was_cut(finished):
    run = Run(finished.path)
    cut, whole = run.sql("select step from stats", limit=7), run.sql("select step from scalars", limit=80)
    assert (cut.num_rows, TRUNCATED in cut.schema.metadata) == (7, True)
    assert (whole.num_rows, TRUNCATED in (whole.schema.metadata or {})) == (80, False)
    with pytest.raises(UsageError):
        run.sql("select 1", limit=0)


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("select * from stat", 'Did you mean "stats"'),
        ("select * from scalar", 'Did you mean "scalars"'),
        ("select nrom from stats", 'Did you mean "norm"'),
        ("select s.zero_fractio from stats s", 'Did you mean "zero_fraction"'),
        ("select layer from gradient_stats", 'Did you mean "layer_name"'),
        ("selec 1", "syntax error"),
        ("select site, norm from stats group by site", "GROUP BY"),
        ("select 1/'a'", "Could not convert"),
    ],
)
def test_a_wrong_query_is_answered_with_what_is_right(finished, query, answer):
    with pytest.raises(QueryError, match=answer):
        Run(finished.path).sql(query)


def test_only_the_views_a_query_names_are_read(finished):
    for path in (finished.path / "stats").rglob("*.parquet"):
        path.unlink()
    run = Run(finished.path)
    assert run.sql("select count(*) n from scalars").to_pylist() == [{"n": 80}]
    with pytest.raises(SondeError):
        run.sql("select count(*) n from stats")


def test_a_query_without_end_is_stopped(finished):
    query = "select count(*) from range(1000000000) a, range(1000000000) b where a.range + b.range = -1"
    with pytest.raises(QueryError, match="stopped after"):
        run_query(Run(finished.path)._state, query, timeout_s=0.3)


@pytest.mark.slow
def test_a_query_inside_one_huge_function_call_is_given_up(finished):
    """DuckDB does not see an interrupt inside a function call, so this needs a process that can be ended."""
    query = "select levenshtein(repeat('ab', 500000), repeat('ba', 500000))"
    program = (
        "import sys; from sonde.read.series import sql; sql.run_query.__defaults__ = (10, 0.5); sql.GRACE_S = 0.5; "
        "from sonde.cli.main import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "query", str(finished.path), query],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "did not stop after 0.5 s" in done.stderr
    assert "leaked" not in done.stderr


def test_a_name_in_a_run_is_data_and_never_sql(record):
    recording = record("it's; drop view stats --", notes="' or 1=1").steps(1).flush()
    (row,) = Run(recording.path).sql("select run_name, notes from runs").to_pylist()
    assert row == {"run_name": "it's; drop view stats --", "notes": "' or 1=1"}


def test_python_variables_are_not_tables(finished):
    import pyarrow as pa

    secret = pa.table({"x": [1]})
    with pytest.raises(QueryError, match='no table "secret"'):
        Run(finished.path).sql("select * from secret")
    assert secret.num_rows == 1


def test_a_live_run_can_be_asked(record):
    recording = record().steps(3).flush()
    rows = Run(recording.path).sql("select max(step) last, count(*) n from stats where kind = 'grad'").to_pylist()
    assert rows == [{"last": 2, "n": 6}]
    assert isinstance(recording.path, Path)
