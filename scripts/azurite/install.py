"""Install Azurite, an Azure emulator for the tensor store tests, into the current environment, once.

The environment gets the command `azurite-blob`. Never fails: without Node or a network those tests skip themselves and
say why.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = Path(sys.prefix) / "azurite"
COMMAND = Path(sys.prefix) / "bin" / "azurite-blob"
LOCK = "package-lock.json"
# An unresponsive registry must cost the tests a minute or two, not their time limit.
PATIENCE_S = 150
OPTIONS = ("--omit=optional", "--fetch-retries=1", "--fetch-timeout=30000", "--loglevel=error")

sys.path.insert(0, str(HERE.parents[1]))
from hatch_build import find_node  # noqa: E402  knows where to find Node


def is_installed() -> bool:
    """Whether the command exists and was installed from this lock file."""
    installed = HOME / LOCK
    return COMMAND.is_file() and installed.is_file() and installed.read_bytes() == (HERE / LOCK).read_bytes()


def install() -> None:
    node, npm = find_node()
    COMMAND.unlink(missing_ok=True)
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    for name in ("package.json", LOCK, ".npmrc"):
        shutil.copy(HERE / name, HOME)
    subprocess.run([node, npm, "ci", *OPTIONS], cwd=HOME, stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE_S)
    put_command(node)


def put_command(node: Path) -> None:
    """Create the command last and atomically: a partial installation must not look complete."""
    fresh = COMMAND.with_name(".azurite-blob.new")
    main = HOME / "node_modules/azurite/dist/src/blob/main.js"
    fresh.write_text(f'#!/bin/sh\nexec "{node}" "{main}" "$@"\n')
    fresh.chmod(0o755)
    fresh.rename(COMMAND)


if __name__ == "__main__" and not is_installed():
    try:
        install()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"Could not install Azurite; the tests that need it will be skipped: {error}\n")
