"""The installation: version, environment, folder of runs, and the origin of each setting."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sonde.cli.output import print_json
from sonde.distribution import version
from sonde.show.term.number import count, size

if TYPE_CHECKING:
    from sonde.config import Setting, Settings

PACKAGES: Final = ("torch", "numpy", "pyarrow", "duckdb", "pydantic")


def describe_installation(settings: Settings | None) -> dict[str, Any]:
    """Version, environment and folder of runs. Without settings, because one is invalid, nothing about the folder."""
    facts = {
        "version": version(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: package_version(name) for name in PACKAGES},
    }
    if settings is None:
        return facts
    where = {"dir": str(settings.dir.absolute()), "dir_origin": settings.origin("dir")}
    return {**facts, **where, **_disk_use(settings.dir)}


def package_version(name: str) -> str | None:
    """The installed version, without importing the package."""
    try:
        return version_of(name)
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
    """Total size of the files in a folder. Links are not followed; files that vanish meanwhile count as 0."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118
            except OSError:
                continue
    return total


def print_settings(rows: list[Setting], *, as_json: bool) -> None:
    """Print every setting with its value and origin; those that few users need come last."""
    if as_json:
        print_json(
            {
                row.name: {
                    "value": row.value,
                    "origin": row.origin,
                    "meaning": row.meaning,
                    "advanced": row.is_advanced,
                }
                for row in rows
            }
        )
        return
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    console = make_console()
    for title, is_advanced in (("setting", False), ("advanced setting", True)):
        columns = [Column(title), Column("value", right=True), Column("from"), Column("meaning", wrap=True)]
        cells = [(row.name, row.value, row.origin, row.meaning) for row in rows if row.is_advanced == is_advanced]
        console.print(table(columns, cells))
        if not is_advanced:
            console.print()


def print_installation(facts: dict[str, Any]) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    packages = ", ".join(f"{name} {found or 'not installed'}" for name, found in facts["packages"].items())
    rows = [
        ("sonde", facts["version"]),
        ("python", f"{facts['python']}  {facts['executable']}"),
        ("platform", facts["platform"]),
        ("packages", packages),
    ]
    if "dir" in facts:
        rows.append(("folder", f"{facts['dir']}  ({facts['dir_origin']})"))
        rows.append(("runs", f"{count(facts['runs'])}, {size(facts['bytes'])}"))
    if facts.get("trash_bytes"):
        rows.append(("trash", size(facts["trash_bytes"])))
    make_console().print(table([Column("", style="dim"), Column("", wrap=True)], rows, header=False))
