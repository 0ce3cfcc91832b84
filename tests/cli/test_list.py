"""`sonde list`: every run there is, filtered, sorted, and honest about what it could not open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sonde.schema.records import sign_document
from sonde.write.folder import create_run


def test_lists_runs_newest_first_with_loss_and_sparkline(sonde: Any, make_run: Any) -> None:
    make_run(name="old")
    make_run(name="new", status="crashed", reason="boom")
    lines = sonde("list").stdout.splitlines()
    assert "crashed" in lines[2]
    assert "gpt/new" in lines[2]
    assert "gpt/old" in lines[3]
    assert "0.15" in lines[3]
    assert "█" in lines[3]


def test_narrow_terminal_cuts_the_name_and_nothing_else(
    sonde: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(name="a-rather-long-name-for-a-run", status="interrupted")
    monkeypatch.setenv("COLUMNS", "80")
    lines = sonde("list").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for text in ("interrupted", "gpt/a-rather-", "…", "0.15", "just now", "20"):
        assert text in lines[2]


def test_json_has_one_object_per_run(sonde: Any, make_run: Any) -> None:
    path = make_run(name="only", losses=[1.0] * 19 + [float("nan")], tags=["t"])
    (run,) = sonde("list", "--json").json
    assert run["name"] == "only"
    assert run["path"] == str(path.resolve())
    assert run["status"] == "finished"
    assert run["last_step"] == 19
    assert run["tags"] == ["t"]
    assert run["loss"]["last"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--project", "gpt"], {"a", "b"}),
        (["--status", "crashed"], {"b"}),
        (["--tag", "good"], {"a"}),
        (["--project", "nothing"], set()),
        (["--limit", "1"], {"c"}),
    ],
)
def test_filters(arguments: list[str], expected: set[str], sonde: Any, make_run: Any) -> None:
    make_run(name="a", tags=["good"])
    make_run(name="b", status="crashed")
    make_run(name="c", project="mlp")
    assert {run["name"] for run in sonde("list", "--json", *arguments).json} == expected


@pytest.mark.parametrize(
    ("sort", "expected"),
    [("created", ["c", "b", "a"]), ("name", ["a", "b", "c"]), ("steps", ["b", "c", "a"]), ("loss", ["b", "a", "c"])],
)
def test_sorts(sort: str, expected: list[str], sonde: Any, make_run: Any) -> None:
    make_run(name="a", losses=[2.0], steps=1)
    make_run(name="b", losses=[9.0, 8.0, 1.0], steps=3)
    make_run(name="c", losses=[1.0, float("nan")], steps=2)
    assert [run["name"] for run in sonde("list", "--json", "--sort", sort).json] == expected


def test_folder_without_runs_is_not_an_error(sonde: Any, tmp_path: Any) -> None:
    answer = sonde("list")
    assert answer.stdout == ""
    assert "No runs in ./runs. Record one:  sonde run train.py" in answer.stderr
    assert sonde("list", "--json").json == []
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_does_not_exist_is_named(sonde: Any) -> None:
    assert "There is no folder ./rnus. Record a run:  sonde run train.py" in sonde("list", "--dir", "rnus").stderr


def test_run_without_scalars_is_listed(sonde: Any, make_run: Any) -> None:
    make_run(steps=0, sites=())
    (run,) = sonde("list", "--json").json
    assert (run["last_step"], run["loss"]) == (-1, None)
    assert "gpt/baseline" in sonde("list").stdout


def test_damaged_run_is_named_and_the_others_are_listed(sonde: Any, make_run: Any) -> None:
    make_run(name="good")
    (make_run(name="bad") / "run.json").write_text('{"format":')
    answer = sonde("list", "--json")
    assert [run["name"] for run in answer.json] == ["good"]
    assert "Skipped" in answer.stderr
    assert "run.json is damaged" in answer.stderr


def test_running_run_is_shown_as_running(sonde: Any, make_run: Any) -> None:
    writer = make_run(status=None)
    try:
        assert [run["status"] for run in sonde("list", "--json").json] == ["running"]
    finally:
        writer.close("finished")


def test_unknown_status_is_answered_with_the_nearest(sonde: Any) -> None:
    assert 'no status "crash". Did you mean "crashed"?' in sonde("list", "--status", "crash", code=2).stderr
    assert 'no sort order "losses". Did you mean "loss"?' in sonde("list", "--sort", "losses", code=2).stderr


def test_dir_option_beats_the_variable(sonde: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("here", name="x")
    make_run("there", name="y")
    monkeypatch.setenv("SONDE_DIR", "there")
    assert [run["name"] for run in sonde("list", "--json").json] == ["y"]
    assert [run["name"] for run in sonde("list", "--json", "--dir", "here").json] == ["x"]


def test_only_the_newest_runs_are_opened(sonde: Any, tmp_path: Path) -> None:
    for number in range(12):
        create_run(tmp_path / "runs", project="gpt", name=f"run-{number}")
    names = sorted(path.name for path in (tmp_path / "runs" / "gpt").iterdir())
    for name in names[:-3]:  # reading one of them would be reported
        (tmp_path / "runs" / "gpt" / name / "run.json").write_text("{")
    done = sonde("list", "-n", "3")
    assert done.stdout.count("gpt/run-") == 3
    assert "Skipped" not in done.stderr
    assert "9 older runs; show all with --limit 12" in done.stderr
    assert "Skipped" in sonde("list").stderr


def test_a_renamed_folder_is_listed_by_the_time_of_its_run(sonde: Any, tmp_path: Path) -> None:
    first = create_run(tmp_path / "runs", project="gpt", name="first")
    create_run(tmp_path / "runs", project="gpt", name="second")
    content = json.loads((first / "run.json").read_text())
    content["created_time"] += 3600
    content.pop("crc32")
    (first / "run.json").write_text(sign_document(json.dumps(content)))
    first.rename(first.with_name("my-favourite"))
    assert "gpt/first" in sonde("list", "-n", "1").stdout
