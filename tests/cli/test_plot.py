"""`sonde plot`: a file of the asked kind, and no file where something is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'sonde-ml[plot]'")


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_writes_what_the_ending_says(make_run: Any, sonde: Any, ending: str, magic: bytes) -> None:
    make_run()
    answer = sonde("plot", "latest", "loss", "-o", f"x.{ending}")
    assert answer.stdout.startswith(f"x.{ending}  ")
    assert Path(f"x.{ending}").read_bytes().startswith(magic)


def test_name_of_the_file_is_said_when_none_is_given(make_run: Any, sonde: Any) -> None:
    run = make_run()
    answer = sonde("plot", "latest", "grad/*/rms", "--style", "heatmap", "--steps", "5:", "--size", "3x2")
    assert answer.stdout.split("  ")[0] == f"{run.name}-grad---rms.png"
    assert Path(f"{run.name}-grad---rms.png").exists()


def test_nothing_is_overwritten_unasked(make_run: Any, sonde: Any) -> None:
    make_run()
    Path("x.png").write_text("mine")
    assert "--force" in sonde("plot", "latest", "loss", "-o", "x.png", code=2).stderr
    assert Path("x.png").read_text() == "mine"
    sonde("plot", "latest", "loss", "-o", "x.png", "--force")
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("loss", "-o", "x.gif"), "png"),
        (("lss",), 'Did you mean "loss"'),
        (("loss", "--size", "big"), "6.4x3.2"),
        (("loss", "--style", "pie"), "heatmap"),
        (("param/0.weight", "--style", "evolution"), "the run has no snapshots. Take some:"),
        (("param/0.weight", "--style", "spectra"), "the run has no snapshots. Take some:"),
    ],
)
def test_mistakes_are_answered_and_leave_no_file(make_run: Any, sonde: Any, arguments: Any, said: str) -> None:
    make_run()
    assert said in sonde("plot", "latest", *arguments, code=2).stderr
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"]
