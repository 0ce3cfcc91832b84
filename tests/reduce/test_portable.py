"""The native kernel gives the same bits whoever compiles it, for whichever processor: what is installed is tried."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("portable.c")
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
OTHERS = {
    "unoptimised": (["cc", "-O0"], []),
    "little optimised": (["cc", "-O1"], []),
    "clang": (["clang", "-O3"], []),
    "aarch64": (["aarch64-linux-gnu-gcc", "-O3", "-static"], ["qemu-aarch64"]),
    "clang for aarch64": (["clang", "--target=aarch64-linux-gnu", "-O3", "-static"], ["qemu-aarch64"]),
}


def printed(command: list[str], runner: list[str], program: Path) -> list[str]:
    subprocess.run([*command, *FLAGS, str(DRIVER), "-o", str(program), "-lm"], check=True, capture_output=True)
    done = subprocess.run([*runner, str(program)], check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """As `hatch_build.py` compiles it."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    lines = printed(["cc", "-O3"], [], tmp_path_factory.mktemp("portable") / "program")
    assert len(lines) == len(set(lines)) == 3 * 4 * 4 * 9
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_same_bits(wanted: list[str], name: str, tmp_path: Path) -> None:
    command, runner = OTHERS[name]
    if any(shutil.which(tool) is None for tool in (command[0], *runner[:1])):
        pytest.skip(f"{command[0]} is not installed")
    assert printed(command, runner, tmp_path / "program") == wanted
