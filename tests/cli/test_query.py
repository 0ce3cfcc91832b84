"""`sonde query`: SQL over a run, in three formats, that can read and nothing else."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

LOSSES = "select step, value from scalars where name = 'loss' order by step"


@pytest.fixture(autouse=True)
def run(make_run: Any) -> Path:
    path: Path = make_run(losses=[1.0, float("nan"), 3.0], steps=3)
    return path


def test_json(sonde: Any) -> None:
    expected = [{"step": 0, "value": 1.0}, {"step": 1, "value": "nan"}, {"step": 2, "value": 3.0}]
    assert sonde("query", "latest", LOSSES, "--json").json == expected
    assert sonde("query", "latest", LOSSES, "--format", "json").json == expected


def test_csv(sonde: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(sonde("query", "latest", LOSSES, "--format", "csv").stdout)))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert rows[2]["value"] == "3"


def test_table(sonde: Any) -> None:
    shown = sonde(
        "query", "latest", "select site, max(norm) as top from stats where kind = 'grad' group by site"
    ).stdout
    assert "2.weight" in shown
    assert "top" in shown


def test_limit_cuts_and_says_so(sonde: Any) -> None:
    answer = sonde("query", "latest", LOSSES, "--limit", 2, "--json")
    assert len(answer.json) == 2
    assert "only the first 2 rows" in answer.stderr
    assert sonde("query", "latest", LOSSES, "--limit", 3, "--json").stderr == ""


def test_two_columns_of_one_name_are_both_there(sonde: Any) -> None:
    assert sonde("query", "latest", "select 1 as a, 2 as a, 3 as a", "--json").json == [{"a": 1, "a_1": 2, "a_2": 3}]


@pytest.mark.parametrize(
    "sql",
    [
        "selct 1",
        "select * from nowhere",
        "drop table scalars",
        "copy (select 1) to 'stolen.csv'",
        "select * from read_csv('/etc/passwd')",
        "attach 'other.db'",
        "",
    ],
)
def test_wrong_or_forbidden_sql_is_one_line(sql: str, sonde: Any) -> None:
    answer = sonde("query", "latest", sql, code=2)
    assert answer.stdout == ""
    assert answer.stderr.startswith("Error: ")
    assert answer.stderr.count("\n") == 1
    assert not Path("stolen.csv").exists()


def test_names_from_sql_are_not_obeyed(sonde: Any) -> None:
    shown = sonde("query", "latest", "select chr(27) || '[31m' as \"a\x1b[2J\"").stdout
    assert "\x1b" not in shown


def test_unknown_format_is_answered_with_the_nearest(sonde: Any) -> None:
    assert 'Did you mean "csv"' in sonde("query", "latest", LOSSES, "--format", "cvs", code=2).stderr


def test_empty_result_says_so_next_to_the_columns(sonde: Any) -> None:
    answer = sonde("query", "latest", "select * from scalars where name = 'none'", "--json")
    assert answer.json == []
    assert answer.stderr == "No rows match this query.\n"


def test_syntax_error_names_no_class_of_the_database(sonde: Any) -> None:
    assert sonde("query", "latest", "selec 1", code=2).stderr.startswith("Error: invalid SQL: syntax error")
