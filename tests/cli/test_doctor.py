"""`sonde doctor`: finds what would break recording, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sonde.cli import doctor
from sonde.distribution import EXTRAS


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def no_torch_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch in a separate process takes seconds; one test does it."""
    monkeypatch.setattr(doctor, "check_torch", lambda: doctor.Check("torch", "ok", "not asked"))


def levels(answer: Any) -> dict[str, str]:
    return {check["name"]: check["level"] for check in answer.json["checks"]}


def test_healthy_machine(sonde: Any, tmp_path: Path) -> None:
    found = levels(sonde("doctor", "--json"))
    assert found["sonde-ml"] == "ok"
    assert found["python"] == found["settings"] == found["write access"] == found["locks"] == "ok"
    assert list(tmp_path.iterdir()) == []
    shown = sonde("doctor").stdout
    assert "Recording will work here" in shown
    assert str(tmp_path / "runs") in shown


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


def test_clock_before_the_installation_is_reported(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.time, "time", lambda: 0.0)
    assert levels(sonde("doctor", "--json"))["clock"] == "warning"


def test_every_extra_is_listed_once_with_what_it_adds(sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor.package_version
    monkeypatch.setattr(doctor, "package_version", lambda name: None if name == "h5py" else installed(name) or "1.0")
    checks = {check["name"]: check for check in sonde("doctor", "--json").json["checks"]}
    for extra, adds in EXTRAS.items():
        assert checks[f"extra {extra}"]["found"].startswith(f"{adds}: ")
        assert sonde("doctor").stdout.count(f"extra {extra} ") == 1
    assert (checks["extra plot"]["level"], checks["extra plot"]["remedy"]) == ("ok", "")
    assert checks["extra h5"]["level"] == "note"
    assert checks["extra h5"]["found"] == "export to HDF5: needs h5py"
    assert checks["extra h5"]["remedy"] == "pip install 'sonde-ml[h5]'"


def test_other_package_of_the_same_module_is_a_warning(
    sonde: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_other(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    (check,) = [check for check in sonde("doctor", "--json").json["checks"] if check["name"] == "sonde-ml"]
    assert check["level"] == "warning"
    assert "sonde 9.9 is installed too" in check["found"]
    assert check["remedy"].startswith("pip uninstall sonde ")
    assert "--force-reinstall --no-deps sonde-ml" in check["remedy"]


def install_other(target: Path) -> None:
    """Install a package called sonde, with pip, into a folder."""
    wheel = target.with_name("sonde-9.9-py3-none-any.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sonde-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: sonde\nVersion: 9.9\n")
        archive.writestr("sonde-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("sonde-9.9.dist-info/RECORD", "")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True)


def test_old_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    assert doctor.check_python().level == "problem"
