"""Options and arguments shared by several verbs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sonde.run import Run

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run: its folder, id, project/name, a unique prefix, or latest.")
]
Dir = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Folder of runs. Default: SONDE_DIR, sonde.yaml, or ./runs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def runs_dir(dir: Path | None) -> Path:
    """The folder of runs: the option if given, otherwise the setting."""
    if dir is not None:
        return dir
    from sonde.config import Settings

    return Settings.load().dir


def open_run(name: str, dir: Path | None) -> Run:
    from sonde.run import open

    return open(name, dir=runs_dir(dir))
