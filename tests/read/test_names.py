from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest

import sonde
from sonde.errors import CorruptError, FormatError, NotARunError, RunError, RunNotFoundError


@pytest.fixture
def two_runs(record):
    return record("baseline", project="gpt").steps(2).finish(), record("warmup", project="gpt").steps(2).finish()


def test_a_run_is_opened_by_folder_id_name_prefix_and_latest(two_runs, tmp_path):
    first, second = two_runs
    first_id = sonde.open(first.path).id
    dir = tmp_path / "runs"
    names = [first.path, str(first.path), first_id, first_id[:5], "gpt/baseline", "baseline", "base", first.path.name]
    assert all(sonde.open(name, dir=dir).path == first.path for name in names)
    assert sonde.open("latest", dir=dir).path == second.path
    assert sonde.open(dir / "latest").path == second.path
    assert sonde.open(first.path / "run.json").path == first.path


def test_dir_is_taken_from_the_environment(two_runs, tmp_path, monkeypatch):
    monkeypatch.setenv("SONDE_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir("/")
    assert sonde.open("gpt/warmup").name == "warmup"
    assert len(sonde.runs()) == 2


def test_latest_may_be_a_text_file(two_runs, tmp_path):
    link = tmp_path / "runs" / "latest"
    link.unlink()
    link.write_text(os.path.relpath(two_runs[0].path, link.parent))
    assert sonde.open("latest", dir=link.parent).path == two_runs[0].path


def test_of_several_runs_with_one_name_the_newest_is_opened(record, tmp_path):
    record("same").finish()
    newest = record("same").finish()
    assert sonde.open("gpt/same", dir=tmp_path / "runs").path == newest.path


def test_a_prefix_of_several_runs_is_refused_with_their_names(two_runs, tmp_path):
    record_names = [two_runs[0].path.name, two_runs[1].path.name]
    with pytest.raises(RunNotFoundError, match="is ambiguous: 2 runs match") as error:
        sonde.open("gpt/2", dir=tmp_path / "runs")
    assert all(name in str(error.value) for name in record_names)


@pytest.mark.parametrize(("number", "more"), [(6, None), (10, None), (12, "and 2 more")])
def test_all_runs_that_an_ambiguous_name_may_mean_are_listed_up_to_ten(record, tmp_path, number, more):
    names = sorted(record(f"run{n}").finish().path.name for n in range(number))
    with pytest.raises(RunNotFoundError, match=f"is ambiguous: {number} runs match") as error:
        sonde.open("run", dir=tmp_path / "runs")
    assert sum(name in str(error.value) for name in names) == min(number, 10)
    assert (" more)" in str(error.value)) == (more is not None)
    assert more is None or f"{more})" in str(error.value)


def test_a_name_that_is_not_there_is_answered_with_near_ones(two_runs, tmp_path):
    with pytest.raises(RunNotFoundError, match="gpt/baseline"):
        sonde.open("gpt/basline", dir=tmp_path / "runs")


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "../../../etc", "nothing"])
def test_names_that_cannot_be_are_refused_plainly(name, tmp_path):
    with pytest.raises(RunError):
        sonde.open(name, dir=tmp_path / "empty")


def test_a_folder_of_runs_is_not_a_run_and_says_what_is_in_it(two_runs, tmp_path):
    with pytest.raises(NotARunError, match="folder of 2 runs"):
        sonde.open(tmp_path / "runs")
    (tmp_path / "other").mkdir()
    with pytest.raises(NotARunError, match=r"no run\.json"):
        sonde.open(tmp_path / "other")


def test_latest_is_the_newest_run_when_its_link_is_broken(two_runs, tmp_path):
    shutil.rmtree(two_runs[1].path)
    assert sonde.open("latest", dir=tmp_path / "runs").path == two_runs[0].path


def test_runs_are_listed_newest_first_and_by_project(two_runs, record, tmp_path):
    record("x", project="other").finish()
    dir = tmp_path / "runs"
    assert [run.name for run in sonde.runs(dir)] == ["x", "warmup", "baseline"]
    assert [run.name for run in sonde.runs(dir, project="gpt")] == ["warmup", "baseline"]
    assert sonde.runs(tmp_path / "nowhere") == []


def change(run: Path, **facts: object) -> None:
    content = json.loads((run / "run.json").read_text())
    content.pop("crc32", None)
    (run / "run.json").write_text(json.dumps({**content, **facts}))


def test_a_newer_format_is_refused_with_the_remedy(finished):
    change(finished.path, format=99)
    with pytest.raises(FormatError, match="pip install -U sonde-ml"):
        sonde.open(finished.path)


WRONG = [
    {"config": [1]},
    {"tags": "abc"},
    {"tags": [1]},
    {"notes": 5},
    {"status": "fine"},
    {"status": None},
    {"heartbeat": 7},
    {"heartbeat": {"acknowledged": {"stats": "x"}}},
    {"heartbeat": {"step": 1.5}},
    {"created_time": "now"},
    {"created_time": 10**400},
    {"format": "1"},
    {"format": True},
    {"facts": []},
    {"git": "main"},
    {"name": {"a": 1}},
]


@pytest.mark.parametrize("facts", WRONG, ids=str)
def test_wrong_types_in_run_json_are_named(finished, facts):
    change(finished.path, **facts)
    with pytest.raises(CorruptError, match=next(iter(facts))):
        sonde.open(finished.path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"x"', b"[" * 100_000, b"\xff\xfe{}", b"null", b"{}"])
def test_an_invalid_run_json_is_refused(finished, text):
    (finished.path / "run.json").write_bytes(text)
    with pytest.raises((CorruptError, NotARunError)):
        sonde.open(finished.path)


def test_one_broken_run_does_not_hide_the_others(two_runs, tmp_path):
    (two_runs[0].path / "run.json").write_bytes(b"{")
    dir = tmp_path / "runs"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [run.name for run in sonde.runs(dir)] == ["warmup"]
    assert list(sonde.runs(dir).broken) == [two_runs[0].path]


def test_times_that_no_calendar_has_do_not_stop_a_run_from_opening(two_runs):
    change(two_runs[0].path, created_time=1e300)
    assert sonde.open(two_runs[0].path).created.year == 1970
