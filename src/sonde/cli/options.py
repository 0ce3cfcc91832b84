"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sonde.run import Run

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A run: its folder, its id, project/name, a unique beginning, or latest.")
]
Dir = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Where runs are kept. Default: SONDE_DIR, sonde.yaml, or runs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def runs_dir(dir: Path | None) -> Path:
    """Where runs are kept: the option, else what the settings say."""
    if dir is not None:
        return dir
    from sonde.config import Settings

    return Settings.load().dir


def open_run(name: str, dir: Path | None) -> Run:
    """The run of that name."""
    from sonde.run import open

    return open(name, dir=runs_dir(dir))
