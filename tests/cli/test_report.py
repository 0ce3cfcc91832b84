"""`sonde report`: a file of the asked format and its name, or a clear word and no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


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
        (("-o", "-", "-f", "pdf"), "needs a file"),
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
