"""Deleted runs: moved in one go to `.trash` in the folder of runs, from where they can be brought back."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from sonde.errors import RunError, RunLockedError, SondeError
from sonde.run import Manifest, Run, open_inside, read_manifest, runs
from sonde.schema.layout import LATEST_LINK, RUN_FILE, TRASH_FOLDER
from sonde.show.folder_lock import held

ORIGINS_FILE: Final = "origins.json"
"""In the trash: where each run lay, below the folder of runs."""
_MAX_ORIGINS_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Trashed:
    """A run in the trash."""

    path: Path
    origin: Path
    manifest: Manifest
    time: float
    """When it was thrown away."""


def move_to_trash(run: Run, dir: Path) -> Path:
    """Move a run to the trash of its folder of runs and say where it is now. A run that is written is refused."""
    if run.status == "running":
        raise RunLockedError(f"run {run.id} ({run.project}/{run.name}) is running. Stop it first, then delete it.")
    home = home_of(run.path, dir)
    with held(run.path, f"run {run.id} is in use by another process. Try again when it has ended."):
        target = _free_name(home, run.path.name)
        run.path.rename(target)
    _note_origin(home, target.name, run.path.relative_to(home))
    if run.path.parent != home:
        _remove_if_empty(run.path.parent)
    mend_latest(home)
    return target


def remove(trashed: Path) -> None:
    """Remove for good what `move_to_trash` moved."""
    shutil.rmtree(trashed)
    origins = _origins(trashed.parent)
    if origins.pop(trashed.name, None) is not None:
        _write_origins(trashed.parent, origins)
    if {path.name for path in trashed.parent.iterdir()} <= {ORIGINS_FILE}:
        (trashed.parent / ORIGINS_FILE).unlink(missing_ok=True)
        trashed.parent.rmdir()


def restore(trashed: Trashed) -> Path:
    """Move a run from the trash to where it was."""
    origin = trashed.origin
    if origin.exists():
        raise RunError(f"{origin} exists again; move {trashed.path} back by hand, under another name.")
    origin.parent.mkdir(exist_ok=True)
    trashed.path.rename(origin)
    origins = _origins(trashed.path.parent)
    origins.pop(trashed.path.name, None)
    _write_origins(trashed.path.parent, origins)
    return origin


def list_trash(dir: Path) -> list[Trashed]:
    """Runs that can be brought back, newest first."""
    folder = dir / TRASH_FOLDER
    found = []
    for name, origin in _origins(folder).items():
        try:
            manifest = read_manifest(folder / name)
            changed = (folder / name).stat().st_ctime  # a rename changes it
        except (SondeError, OSError):  # removed by hand, or damaged: nothing to bring back
            continue
        found.append(Trashed(folder / name, dir / origin, manifest, changed))
    return sorted(found, key=lambda one: one.time, reverse=True)


def home_of(path: Path, dir: Path) -> Path:
    """The folder of runs that a run belongs to."""
    return dir.resolve() if path.is_relative_to(dir.resolve()) else path.parent


def mend_latest(dir: Path) -> None:
    """`latest` points to the newest run that is left, or is gone with the last."""
    link = dir / LATEST_LINK
    if not link.is_symlink() or (link / RUN_FILE).is_file():
        return
    left = runs(dir)
    link.unlink()
    if left:
        link.symlink_to(os.path.relpath(left[0].path, dir.resolve()), target_is_directory=True)


def _free_name(home: Path, name: str) -> Path:
    trash = home / TRASH_FOLDER
    trash.mkdir(exist_ok=True)
    target, number = trash / name, 2
    while target.exists():
        target, number = trash / f"{name}-{number}", number + 1
    return target


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _origins(trash: Path) -> dict[str, str]:
    """Names in the trash and where they lay. What leads elsewhere is left out: the file may be anybody's."""
    try:
        with open_inside(trash, ORIGINS_FILE) as file:
            document = json.loads(file.read(_MAX_ORIGINS_BYTES))
    except (OSError, ValueError, RecursionError, SondeError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {name: origin for name, origin in document.items() if _is_plain(name, 1) and _is_plain(origin, 2)}


def _is_plain(path: object, max_parts: int) -> bool:
    """Whether a path stays below where it begins and names nothing hidden."""
    if not isinstance(path, str) or not path or "\0" in path:
        return False
    parts = PurePosixPath(path).parts
    return 1 <= len(parts) <= max_parts and not any(part.startswith((".", "/")) for part in parts)


def _note_origin(home: Path, name: str, origin: Path) -> None:
    trash = home / TRASH_FOLDER
    _write_origins(trash, {**_origins(trash), name: origin.as_posix()})


def _write_origins(trash: Path, origins: dict[str, str]) -> None:
    tmp = trash / f".{ORIGINS_FILE}-{os.getpid()}"
    tmp.write_text(json.dumps(origins), encoding="utf-8")
    tmp.replace(trash / ORIGINS_FILE)
