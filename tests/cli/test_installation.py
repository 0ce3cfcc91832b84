"""`sonde doctor --no-checks` and `--settings`: what is installed, where runs are, and where each setting came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_says_version_folder_and_disk_use(sonde: Any, make_run: Any) -> None:
    run = make_run()
    found = sonde("doctor", "--no-checks", "--json").json
    assert found["runs"] == 1
    assert found["dir"] == str(Path("runs").absolute())
    assert found["bytes"] == sum(path.lstat().st_size for path in run.rglob("*") if path.is_file())
    assert found["packages"]["numpy"]
    assert found["version"] in sonde("--version").stdout


def test_folder_that_is_not_there_holds_nothing(sonde: Any) -> None:
    found = sonde("doctor", "--no-checks", "--json", "--dir", "nowhere").json
    assert (found["runs"], found["bytes"], found["dir_origin"]) == (0, 0, "keyword")
    assert not Path("nowhere").exists()


def test_trash_is_counted_apart(sonde: Any, make_run: Any) -> None:
    make_run()
    sonde("delete", "latest", "--yes")
    found = sonde("doctor", "--no-checks", "--json").json
    assert found["runs"] == found["bytes"] == 0
    assert found["trash_bytes"] > 0
    assert "trash" in sonde("doctor", "--no-checks").stdout


def test_settings_show_where_each_value_came_from(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sonde.yaml").write_text("project: mine\nwriter: {flush_mib: 2}\n")
    monkeypatch.setenv("SONDE_BUDGET", "0.05")
    found = sonde("doctor", "--settings", "--json").json
    origin = f"file {Path('sonde.yaml').absolute()}"
    assert found["project"]["origin"] == origin
    assert found["writer.flush_mib"] == {
        "value": 2.0, "origin": origin, "meaning": "Amount of waiting data, in MiB, that also triggers a flush.",
        "advanced": True,
    }  # fmt: skip
    assert (found["budget"]["value"], found["budget"]["origin"]) == (0.05, "env SONDE_BUDGET")
    assert (found["mode"]["origin"], found["mode"]["advanced"]) == ("default", False)
    shown = sonde("doctor", "--settings").stdout
    assert "env SONDE_BUDGET" in shown
    assert "writer.flush_mib" in shown


def test_bad_setting_is_a_usage_error_with_the_nearest_name(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_BUGDET", "0.05")
    error = sonde("doctor", "--no-checks", code=2).stderr
    assert 'Did you mean "SONDE_BUDGET"' in error
    assert error.count("\n") == 1


def test_settings_that_users_set_first_come_first(sonde: Any) -> None:
    basic, advanced = sonde("doctor", "--settings").stdout.split("advanced setting")
    assert basic.split().index("dir") < basic.split().index("budget") < basic.split().index("system_metrics")
    assert "writer.flush_mib" not in basic
    assert "memory_high" in advanced
