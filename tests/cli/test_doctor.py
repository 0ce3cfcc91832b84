"""`sonde doctor`: finds what would break recording, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sonde.cli import doctor


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def no_torch_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch in a process of its own takes seconds; one test does it."""
    monkeypatch.setattr(doctor, "check_torch", lambda: doctor.Check("torch", "ok", "not asked"))


def levels(answer: Any) -> dict[str, str]:
    return {check["name"]: check["level"] for check in answer.json}


def test_healthy_machine(sonde: Any, tmp_path: Path) -> None:
    found = levels(sonde("doctor", "--json"))
    assert found["python"] == found["settings"] == found["write access"] == found["locks"] == "ok"
    assert list(tmp_path.iterdir()) == []
    assert "Recording will work here" in sonde("doctor").stdout


def test_folder_that_cannot_be_written_is_a_problem(sonde: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = sonde("doctor", "--json", "--dir", tmp_path / "file" / "runs", code=1)
    assert levels(answer)["write access"] == "problem"
    assert "would break recording" in sonde("doctor", "--dir", tmp_path / "file" / "runs", code=1).stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder_is_a_problem(sonde: Any, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert levels(sonde("doctor", "--json", "--dir", tmp_path / "closed", code=1))["write access"] == "problem"


@pytest.mark.parametrize(
    ("free", "level", "code"), [(1 << 20, "problem", 1), (500 << 20, "warning", 0), (1 << 40, "ok", 0)]
)
def test_space(free: int, level: str, code: int, sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(1 << 41, 0, free))
    assert levels(sonde("doctor", "--json", code=code))["free space"] == level


def test_disk_that_cannot_sync_is_a_problem(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor.os, "fsync", fail)
    assert levels(sonde("doctor", "--json", code=1))["fsync"] == "problem"


def test_bad_setting_is_a_problem(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_MODE", "of")
    assert levels(sonde("doctor", "--json", code=1))["settings"] == "problem"


def test_clock_before_the_installation_is_told(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.time, "time", lambda: 0.0)
    assert levels(sonde("doctor", "--json"))["clock"] == "warning"


def test_missing_package_is_told_with_its_install_line(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "package_version", lambda name: None)
    (check,) = [check for check in sonde("doctor", "--json").json if check["name"] == "h5py"]
    assert (check["level"], check["remedy"]) == ("note", "For export to HDF5:  pip install 'sonde[h5]'")


def test_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    assert doctor.check_python().level == "problem"
