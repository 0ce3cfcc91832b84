"""`sonde info`: which sonde this is, what it runs on, where runs are, where each setting came from."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json
from sonde.cli.output import print_json
from sonde.show.term.number import count, size

PACKAGES: Final = ("torch", "numpy", "pyarrow", "duckdb", "pydantic")


def info(
    dir: Dir = None,
    settings: Annotated[bool, typer.Option("--settings", help="Every setting, its value and its origin.")] = False,
    json: Json = False,
) -> None:
    """Say which sonde this is, where runs are kept, and what is set.

    \b
    Examples:
      sonde info
      sonde info --settings
      SONDE_BUDGET=0.05 sonde info --settings --json
    """
    from sonde.config import Settings

    loaded = Settings.load() if dir is None else Settings.load(dir=dir)
    if settings:
        _show_settings(loaded.explain(), json)
        return
    facts = {
        "version": version("sonde"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "dir": str(loaded.dir.absolute()),
        "dir_origin": loaded.origin("dir"),
        **_disk_use(loaded.dir),
    }
    print_json(facts) if json else _show_facts(facts)


def package_version(name: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _disk_use(dir: Path) -> dict[str, Any]:
    from sonde.run import runs
    from sonde.schema.layout import TRASH_FOLDER

    folders = [run.path for run in runs(dir)] if dir.is_dir() else []
    return {
        "runs": len(folders),
        "bytes": sum(folder_bytes(folder) for folder in folders),
        "trash_bytes": folder_bytes(dir / TRASH_FOLDER),
    }


def folder_bytes(folder: Path) -> int:
    """What the files in a folder take; links are not followed, and files that vanish meanwhile count nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118
            except OSError:
                continue
    return total


def _show_settings(rows: list[Any], json: bool) -> None:
    if json:
        print_json({row.name: {"value": row.value, "origin": row.origin, "meaning": row.meaning} for row in rows})
        return
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    columns = [Column("setting"), Column("value", right=True), Column("from"), Column("meaning", wrap=True)]
    make_console().print(table(columns, [(row.name, row.value, row.origin, row.meaning) for row in rows]))


def _show_facts(facts: dict[str, Any]) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    packages = ", ".join(f"{name} {found or 'not installed'}" for name, found in facts["packages"].items())
    rows = [
        ("sonde", facts["version"]),
        ("python", f"{facts['python']}  {facts['executable']}"),
        ("platform", facts["platform"]),
        ("packages", packages),
        ("runs are in", f"{facts['dir']}  ({facts['dir_origin']})"),
        ("runs", f"{count(facts['runs'])}, {size(facts['bytes'])}"),
    ]
    if facts["trash_bytes"]:
        rows.append(("trash", size(facts["trash_bytes"])))
    make_console().print(table([Column("", style="dim"), Column("", wrap=True)], rows, header=False))
