"""What `sonde doctor` says of torch: absent, broken, old or fine."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from sonde.cli import doctor


def answer(monkeypatch: pytest.MonkeyPatch, version: str | None, returncode: int = 0, stderr: str = "") -> doctor.Check:
    monkeypatch.setattr(doctor, "package_version", lambda name: version)

    def run(*arguments: Any, **options: Any) -> Any:
        return subprocess.CompletedProcess(arguments, returncode, "1\nnative\n", stderr)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    return doctor.check_torch()


def test_real_torch_is_imported_in_a_separate_process() -> None:
    check = doctor.check_torch()
    assert check.level == "ok"
    assert "CUDA device" in check.found
    assert check.found.endswith("kernel for the CPU")


def test_absent_torch_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(monkeypatch, None).level == "note"


def test_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    check = answer(monkeypatch, "2.13.0", 1, "Traceback …\nOSError: libcudart.so.12: cannot open\n")
    assert check.level == "problem"
    assert "libcudart" in check.found


@pytest.mark.parametrize(
    ("version", "level"), [("2.4.1", "warning"), ("1.13", "warning"), ("2.13.0+cpu", "ok"), ("3.0a0", "ok")]
)
def test_old_torch_is_reported(version: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(monkeypatch, version).level == level
