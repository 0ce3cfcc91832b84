"""`sonde delete`: asks first, never touches a running run, and what it took away can be brought back."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest


def test_deleted_run_is_in_the_trash_and_comes_back_whole(sonde: Any, make_run: Any) -> None:
    run = make_run()
    files = sorted(path.relative_to(run) for path in run.rglob("*"))
    (moved,) = sonde("delete", "latest", "--yes", "--json").json
    assert not run.exists()
    assert sonde("list", "--json").json == []
    trash = Path(moved["trash"])
    assert trash.parent == Path("runs/.trash").resolve()
    run.parent.mkdir(exist_ok=True)
    trash.rename(run)
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == files
    assert sonde("show", run, "--json").json["last_step"] == 19


def test_the_way_back_is_printed(sonde: Any, make_run: Any) -> None:
    run = make_run()
    assert f"mv {Path('runs/.trash').resolve() / run.name} {run.resolve()}" in sonde("delete", run, "-y").stdout


def test_permanently_leaves_nothing(sonde: Any, make_run: Any) -> None:
    make_run()
    sonde("delete", "latest", "--yes", "--permanently")
    assert list(Path("runs").iterdir()) == []


def test_running_run_is_refused(sonde: Any, make_run: Any) -> None:
    writer = make_run(status=None)
    try:
        assert "is running. Stop it first" in sonde("delete", "latest", "--yes", code=1).stderr
        assert (writer.run / "run.json").exists()
    finally:
        writer.close("finished")


@pytest.mark.parametrize(("answer", "code", "is_left"), [("y\n", 0, False), ("n\n", 1, True), ("", 2, True)])
def test_asks_first(answer: str, code: int, is_left: bool, process: Any, make_run: Any) -> None:
    run = make_run()
    result = process("delete", "latest", stdin=answer)
    assert result.code == code, result
    assert run.exists() == is_left
    assert "gpt/baseline" in result.stderr
    assert ("Add --yes" in result.stderr) == (answer == "")


def test_latest_points_to_the_newest_that_is_left(sonde: Any, make_run: Any) -> None:
    make_run(name="old")
    make_run(name="new")
    sonde("delete", "new", "--yes")
    assert sonde("show", "latest", "--json").json["name"] == "old"
    assert not os.path.isabs(os.readlink("runs/latest"))
    sonde("delete", "old", "--yes")
    assert not os.path.lexists("runs/latest")


def test_nothing_is_deleted_when_one_of_several_is_unknown(sonde: Any, make_run: Any) -> None:
    run = make_run()
    sonde("delete", "baseline", "nonsense", "--yes", code=1)
    assert run.exists()


def test_two_runs_of_one_folder_name_both_fit_in_the_trash(sonde: Any, make_run: Any) -> None:
    first, second = make_run(project="a"), make_run(project="b")
    second = second.rename(second.with_name(first.name))
    sonde("delete", first, second, "--yes")
    assert len([path for path in Path("runs/.trash").iterdir() if path.is_dir()]) == 2


def test_run_outside_the_folder_of_runs_goes_to_a_trash_next_to_it(sonde: Any, make_run: Any) -> None:
    run = make_run("elsewhere")
    (moved,) = sonde("delete", run, "--yes", "--json").json
    assert Path(moved["trash"]).parent == run.resolve().parent / ".trash"


def test_what_a_link_in_the_run_points_to_is_left_alone(sonde: Any, make_run: Any, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (make_run() / "link").symlink_to(precious)
    sonde("delete", "latest", "--yes", "--permanently")
    assert (precious / "file").read_text() == "x"


def test_question_without_a_terminal_is_on_a_separate_line(process: Any, make_run: Any) -> None:
    answer = process("delete", make_run().name)
    assert re.search(r"\[y/N\]: ?\nError: needs confirmation", answer.stderr)
