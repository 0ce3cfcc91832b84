"""Azurite, an Azure server for the tests of the tensor store, into the environment that runs this; once.

It becomes `azurite-blob` among the environment's commands. Never fails: without Node or a network those tests skip and
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
# A registry that does not answer must cost the tests a minute or two, not their time limit.
PATIENCE_S = 150
OPTIONS = ("--omit=optional", "--fetch-retries=1", "--fetch-timeout=30000", "--loglevel=error")

sys.path.insert(0, str(HERE.parents[1]))
from hatch_build import find_node  # noqa: E402  it knows where Node may be


def is_installed() -> bool:
    """Whether the command is there and made from this very lock file."""
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
    """Last of all, and at once: what is half installed must not look whole."""
    fresh = COMMAND.with_name(".azurite-blob.new")
    main = HOME / "node_modules/azurite/dist/src/blob/main.js"
    fresh.write_text(f'#!/bin/sh\nexec "{node}" "{main}" "$@"\n')
    fresh.chmod(0o755)
    fresh.rename(COMMAND)


if __name__ == "__main__" and not is_installed():
    try:
        install()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"Azurite could not be installed; its tests will be skipped: {error}\n")
