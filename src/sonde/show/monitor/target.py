"""The target of the monitor: a run, a folder of runs or checkpoints, or one that does not exist yet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sonde.errors import SondeError
from sonde.run import Run, find_run, linked_run, run_folders
from sonde.schema.layout import RUN_FILE


@dataclass(frozen=True, slots=True)
class Target:
    """The folder to search for runs, and the run that was requested by name."""

    folder: Path
    only: Path | None = None
    """The folder of one run; if None, the newest run in `folder` is shown and the others are listed."""

    def runs(self) -> list[Run]:
        """The runs that can be opened, newest first."""
        folders = [self.only] if self.only else list(run_folders(self.folder))
        found = [run for folder in folders if (run := _try_open(folder)) is not None]
        return sorted(found, key=lambda run: (run.created, run.path.name), reverse=True)


def _try_open(folder: Path) -> Run | None:
    try:
        return Run(folder)
    except SondeError:  # being created, or damaged: `sonde list` says which
        return None


def find_target(name: str | None, dir: Path) -> Target:
    """Resolve a name. A path without a run yet is waited for; an unknown name is an error."""
    if name is None:
        return Target(dir)
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if not path.exists() and _looks_like_a_path(name):
        return Target(path)
    run = find_run(name, dir)
    return Target(run.parent, run)


def _of_folder(path: Path) -> Target:
    """A run, the run that a folder of checkpoints belongs to, or a folder of runs."""
    real = path.resolve()
    for folder in (real, *list(real.parents)[:3]):  # <run>/checkpoints/step-000000500
        if (folder / RUN_FILE).is_file():
            return Target(folder.parent, folder)
    linked = linked_run(real)  # where a trainer puts its checkpoints
    if linked is not None:
        return Target(linked.parent, linked)
    if next(run_folders(real), None) is None and (real / "runs").is_dir():
        return Target(real / "runs")
    return Target(real)


def _looks_like_a_path(name: str) -> bool:
    """Whether the text looks like a path rather than the name of a run."""
    separators = tuple(filter(None, (os.sep, os.altsep)))
    return name.startswith((".", "~", *separators)) or name.endswith(separators)
