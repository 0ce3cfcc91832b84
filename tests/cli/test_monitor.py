"""`sonde monitor`: one frame for pipes and programs, and a clear word where there is no terminal."""

from __future__ import annotations

import os
from typing import Any


def test_once_prints_one_frame_as_plain_text(make_run: Any, sonde: Any) -> None:
    make_run()
    shown = sonde("monitor", "--once").stdout
    assert "gpt/baseline  finished  step 19" in shown
    assert "grad/*/rms" in shown
    assert "\x1b" not in shown


def test_once_as_json(make_run: Any, sonde: Any) -> None:
    make_run()
    make_run(name="other", losses=[1.0, float("nan")], steps=2)
    frame = sonde("monitor", "--once", "--json").json
    assert frame["run"]["name"] == "other"
    assert frame["scalars"] == {"loss": "nan"}
    assert [run["name"] for run in frame["runs"]] == ["other", "baseline"]
    assert frame["worst_layers"]["layers"]


def test_once_of_nothing_says_what_to_do(sonde: Any) -> None:
    assert "sonde run train.py" in sonde("monitor", "--once").stdout
    assert sonde("monitor", "--json").json["run"] is None


def test_run_by_name(make_run: Any, sonde: Any) -> None:
    make_run(name="a")
    make_run(name="b")
    assert "gpt/a" in sonde("monitor", "gpt/a", "--once").stdout
    assert "Closest" in sonde("monitor", "gpt/zzz", "--once", code=1).stderr


def test_without_a_terminal_it_points_to_once(make_run: Any, sonde: Any) -> None:
    make_run()
    assert "--once" in sonde("monitor", code=2).stderr


def test_narrow_pipe_is_respected(make_run: Any, process: Any) -> None:
    make_run()
    answer = process("monitor", "--once", env={"COLUMNS": "60", **os.environ})
    assert answer.code == 0
    assert max(map(len, answer.stdout.splitlines())) <= 60
