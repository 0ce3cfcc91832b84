"""Deleted runs: moved atomically to `.trash` in the folder of runs, from where they can be restored.

`held` locks a folder while its contents are moved or deleted, so that no writer starts meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from sonde.errors import RunError, RunLockedError, SondeError
from sonde.run import Manifest, Run, open_inside, read_manifest, runs
from sonde.schema.layout import LATEST_LINK, LOCK_FILE, RUN_FILE, TRASH_FOLDER

ORIGINS_FILE: Final = "origins.json"
"""File in the trash with the original path of each run, relative to the folder of runs."""
_MAX_ORIGINS_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Trashed:
    path: Path
    origin: Path
    manifest: Manifest
    time: float
    """Time of deletion."""


def delete_run(run: Run, *, permanently: bool = False, dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Move a run to the trash of its folder of runs, or delete it. Returns its path in the trash."""
    target = move_to_trash(run, run.path.parent.parent if dir is None else Path(dir))
    if not permanently:
        return target
    remove(target)
    return None


def move_to_trash(run: Run, dir: Path) -> Path:
    """Move a run to the trash of its folder of runs and return its new path. A running run is refused."""
    if run.status == "running":
        raise RunLockedError(f"run {run.id} ({run.project}/{run.name}) is running. Stop it first, then delete it.")
    home = home_of(run.path, dir)
    with held(run.path, f"run {run.id} is in use by another process. Try again when that process has ended."):
        target = _free_name(home, run.path.name)
        run.path.rename(target)
    _note_origin(home, target.name, run.path.relative_to(home))
    if run.path.parent != home:
        _remove_if_empty(run.path.parent)
    mend_latest(home)
    return target


def remove(trashed: Path) -> None:
    """Permanently delete a run that `move_to_trash` moved."""
    shutil.rmtree(trashed)
    origins = _origins(trashed.parent)
    if origins.pop(trashed.name, None) is not None:
        _write_origins(trashed.parent, origins)
    if {path.name for path in trashed.parent.iterdir()} <= {ORIGINS_FILE}:
        (trashed.parent / ORIGINS_FILE).unlink(missing_ok=True)
        trashed.parent.rmdir()


def restore(trashed: Trashed) -> Path:
    """Move a run from the trash back to its original path."""
    origin = trashed.origin
    if origin.exists():
        raise RunError(f"{origin} already exists. Move {trashed.path} back by hand, under another name.")
    origin.parent.mkdir(exist_ok=True)
    trashed.path.rename(origin)
    origins = _origins(trashed.path.parent)
    origins.pop(trashed.path.name, None)
    _write_origins(trashed.path.parent, origins)
    return origin


def list_trash(dir: Path) -> list[Trashed]:
    """Runs that can be restored, newest first."""
    folder = dir / TRASH_FOLDER
    found = []
    for name, origin in _origins(folder).items():
        try:
            manifest = read_manifest(folder / name)
            changed = (folder / name).stat().st_ctime  # a rename changes it
        except (SondeError, OSError):  # removed by hand, or damaged: nothing to restore
            continue
        found.append(Trashed(folder / name, dir / origin, manifest, changed))
    return sorted(found, key=lambda one: one.time, reverse=True)


def home_of(path: Path, dir: Path) -> Path:
    """The folder of runs that a run belongs to."""
    return dir.resolve() if path.is_relative_to(dir.resolve()) else path.parent


def mend_latest(dir: Path) -> None:
    """Point `latest` to the newest remaining run, or remove it if there is none."""
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
    """Names in the trash and their original paths. Unsafe paths are left out: the file is not trusted."""
    try:
        with open_inside(trash, ORIGINS_FILE) as file:
            document = json.loads(file.read(_MAX_ORIGINS_BYTES))
    except (OSError, ValueError, RecursionError, SondeError):
        return {}
    if not isinstance(document, dict):
        return {}
    return {name: origin for name, origin in document.items() if _is_plain(name, 1) and _is_plain(origin, 2)}


def _is_plain(path: object, max_parts: int) -> bool:
    """Whether a relative path stays below its start and has no hidden parts."""
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


@contextmanager
def held(folder: Path, refusal: str) -> Iterator[None]:
    """Hold the lock inside the block; if another process has it already, raise RunLockedError with this message."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    path = folder / LOCK_FILE
    if not path.is_file() or path.is_symlink():
        yield
        return
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(refusal) from None
        yield
