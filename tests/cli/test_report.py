"""`sonde report`: a file of the asked format and its name, or a clear word and no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sonde.write.checkpoints import write_link


def test_markdown_is_written_and_its_name_said(make_run: Any, sonde: Any) -> None:
    make_run()
    answer = sonde("report", "latest", "-o", "r.md")
    assert answer.stdout.startswith("r.md  ")
    assert "## Training convergence" in Path("r.md").read_text()


def test_default_name_is_that_of_the_run(make_run: Any, sonde: Any) -> None:
    run = make_run()
    answer = sonde("report", "--format", "json", "--json")
    assert answer.json["path"] == f"{run.name}-report.json"
    assert set(answer.json["analyses"]) == {"convergence", "gradient_flow", "weights", "overfitting"}
    assert Path(answer.json["path"]).exists()


def test_report_can_be_printed(make_run: Any, sonde: Any) -> None:
    make_run()
    assert sonde("report", "latest", "-f", "json", "-o", "-").json["sonde_report"] == 1
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"]


def test_report_is_written_again_but_not_over_other_files(make_run: Any, sonde: Any) -> None:
    make_run()
    sonde("report", "latest", "-o", "r.md")
    sonde("report", "latest", "-o", "r.md")
    Path("r.md").write_text("mine")
    assert "--force" in sonde("report", "latest", "-o", "r.md", code=2).stderr
    assert Path("r.md").read_text() == "mine"
    sonde("report", "latest", "-o", "r.md", "--force")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", "r.docx"), "--format"),
        (("-f", "docx"), "html, json, md, pdf"),
        (("-o", "no/such/folder/r.md"), "no folder"),
        (("-o", "-", "-f", "pdf"), "name a file with -o"),
    ],
)
def test_mistakes_are_answered(make_run: Any, sonde: Any, arguments: Any, said: str) -> None:
    make_run()
    assert said in sonde("report", "latest", *arguments, code=2).stderr
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"]


def test_browser_that_is_named_and_not_there_is_said(
    make_run: Any, sonde: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sonde.show.web.assets import FOLDER

    if not (FOLDER / "app.js").is_file():
        pytest.skip("the front-end is not built: make web")
    make_run()
    monkeypatch.setenv("SONDE_CHROMIUM", "/no/such/browser")
    assert "/no/such/browser" in sonde("report", "latest", "-o", "r.pdf", code=2).stderr
    assert not Path("r.pdf").exists()


def test_text_can_be_printed_and_written_again(make_run: Any, sonde: Any) -> None:
    make_run()
    printed = sonde("report", "-f", "txt", "-o", "-").stdout
    assert "Training convergence\n--------------------\n" in printed
    sonde("report", "-o", "r.txt")
    sonde("report", "-o", "r.txt")
    assert Path("r.txt").read_text() == printed


def test_a_folder_of_checkpoints_is_reported(make_run: Any, sonde: Any) -> None:
    run = make_run()
    write_link(Path("checkpoints"), run)
    answer = sonde("report", "checkpoints", "--json")
    assert answer.json["path"] == "checkpoints-report.html"
    assert {"convergence", "weight_evolution"} <= set(answer.json["analyses"])
    sonde("report", "checkpoints")  # its own file is written again
    assert "html, json or txt" in sonde("report", "checkpoints", "-f", "md", code=2).stderr


def test_gradients_are_written_next_to_the_report(make_run: Any, sonde: Any) -> None:
    make_run()
    answer = sonde("report", "-o", "r.md", "--gradients", "g.parquet")
    assert "Wrote gradient statistics of 3 parameters to g.parquet." in answer.stderr
    assert Path("g.parquet").exists()


def test_a_folder_of_runs_is_named_as_one(make_run: Any, sonde: Any) -> None:
    make_run()
    assert "not a run but a folder of 1 run" in sonde("report", "runs", code=1).stderr
