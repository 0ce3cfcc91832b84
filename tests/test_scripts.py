"""The scripts behind the Makefile: which tests are closest to a file, and how long each part took."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sonde"


@pytest.fixture(scope="module")
def tests_of() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tests_of", ROOT / "scripts" / "tests_of.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("write/queue.py", "write/test_queue.py"),
        ("write/tensors/stores/zarr.py", "write/stores/test_zarr.py"),
        ("diagnose/rules/class_imbalance.py", "diagnose/rules/test_data.py"),
        ("session/snapshots/gather.py", "session/test_snapshots.py"),
        ("config.py", "test_config.py"),
    ],
)
def test_the_closest_tests_come_first(source: str, first: str, tests_of: ModuleType) -> None:
    assert tests_of.closest(PACKAGE / source)[0] == ROOT / "tests" / first


def test_every_source_file_has_tests(tests_of: ModuleType) -> None:
    sources = [path for path in PACKAGE.rglob("*.py") if path.stat().st_size]
    assert len(sources) > 100
    assert [source for source in sources if not tests_of.closest(source)] == []


def test_what_is_not_a_source_file_is_refused() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "tests_of.py"), str(ROOT / "README.md")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Example:  make quick FILE=src/sonde/" in done.stderr


def test_parts_are_timed_and_the_first_that_fails_ends_them(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "making $2"\ntest "$2" != broken\n')
    make.chmod(0o755)
    command = [sys.executable, str(ROOT / "scripts" / "parts.py"), str(make), "lint", "broken", "quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert done.returncode == 1
    assert [(line[0], line[-1]) for line in words] == [("lint", "s"), ("broken", "failed"), ("in", "s")]
