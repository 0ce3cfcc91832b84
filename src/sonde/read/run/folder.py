"""Lookup of run folders by name, and access to the files in them. A folder is not trusted: nothing outside is read."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from sonde.errors import CorruptError, NotARunError, RunError, RunNotFoundError, SondeError
from sonde.read.run.manifest import Manifest, parse_manifest
from sonde.schema.layout import LATEST_LINK, RUN_FILE

MAX_NAMED: Final = 10
"""Number of runs that an error names."""
MAX_RUN_FILE_BYTES: Final = 64 << 20
_MAX_LINK_BYTES: Final = 4096
_STARTED: Final = re.compile(r"\d{8}-\d{6}-")


def default_dir() -> Path:
    """The folder of runs that the setting `dir` names: by SONDE_DIR, by sonde.yaml, or `runs`."""
    from sonde.config import Settings

    return Settings.load().dir


def inside(run: Path, *parts: str) -> Path:
    """A path in a run folder; a path that leaves it, by name or by a link, is refused."""
    path = run.joinpath(*parts)
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name with NUL
        raise CorruptError(f"{run.name}: cannot resolve {'/'.join(parts)!r}: {error}.") from error
    if not real.is_relative_to(run.resolve()):
        raise CorruptError(
            f"{run.name}: {'/'.join(parts)!r} leads out of the run folder (to {real}), so it is not read."
        )
    return real


def open_inside(run: Path, *parts: str) -> BinaryIO:
    """Open a regular file of a run folder for reading. Raises FileNotFoundError if it does not exist."""
    return open_regular(inside(run, *parts), f"{run.name}: {'/'.join(parts)!r}")


def open_regular(path: Path, label: str) -> BinaryIO:
    """Open a regular file for reading; links are not followed. `label` names the file in errors."""
    # O_NONBLOCK: opening a pipe must not block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptError(f"{label} is not a regular file, so it is not read.")
    return os.fdopen(descriptor, "rb")


def read_manifest(run: Path) -> Manifest:
    """Read and check the run's run.json."""
    try:
        with open_inside(run, RUN_FILE) as file:
            text = file.read(MAX_RUN_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _not_a_run(run) from None
    except OSError as error:
        raise RunError(f"cannot read {run / RUN_FILE}: {error.strerror}. Check its permissions.") from error
    if len(text) > MAX_RUN_FILE_BYTES:
        raise CorruptError(f"{run / RUN_FILE} is larger than {MAX_RUN_FILE_BYTES >> 20} MiB, so it is not read.")
    return parse_manifest(text, where=str(run / RUN_FILE))


def run_folders(dir: Path) -> Iterator[Path]:
    """Every run folder below `dir`: `<dir>/<project>/<run>` and `<dir>/<run>`. Hidden folders are skipped."""
    for folder in _folders(dir):
        if (folder / RUN_FILE).is_file():
            yield folder
        else:
            yield from (inner for inner in _folders(folder) if (inner / RUN_FILE).is_file())


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """Folders by the time in their names; those that were renamed, by the time in run.json."""

    def key(folder: Path) -> tuple[str, str]:
        started = _STARTED.match(folder.name)
        return (started[0] if started else _created(folder), folder.name)

    return sorted(folders, key=key, reverse=True)


def _created(folder: Path) -> str:
    try:
        return f"{datetime.fromtimestamp(read_manifest(folder).created_time, UTC):%Y%m%d-%H%M%S}-"
    except (SondeError, ValueError, OverflowError, OSError):
        return ""


def _folders(dir: Path) -> list[Path]:
    try:
        with os.scandir(dir) as entries:
            found = [
                Path(entry.path)
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    return sorted(found)


def find_run(name: str | os.PathLike[str], dir: Path | None = None) -> Path:
    """Find the folder of a run by its folder, id, "project/name", a unique prefix of these, or "latest".

    If several runs have exactly this name, the newest is returned.
    """
    text = os.fspath(name)
    if not text or "\0" in text:
        raise RunNotFoundError(f'invalid run name {text!r}. Give a folder, an id, "project/name" or "latest".')
    folder = _as_folder(Path(text))
    if folder is None:
        dir = default_dir() if dir is None else dir
        folder = _as_folder(dir / text) or _find_by_name(text, dir)
    return folder


def _as_folder(path: Path) -> Path | None:
    """The run folder at this path; None if nothing exists there. Anything else there is an error."""
    try:
        if path.is_file():
            return _follow_text_link(path)
        if not path.is_dir():
            return None
        folder = path.resolve()
    except (OSError, RuntimeError, ValueError):  # too long for a path, but it may still be a name
        return None
    if not (folder / RUN_FILE).exists():
        raise _not_a_run(path)
    return folder


def _follow_text_link(path: Path) -> Path:
    """Follow `latest` on systems without links, where it is a file with a relative path."""
    if path.name == RUN_FILE:
        return path.parent.resolve()
    if path.name == LATEST_LINK:
        with open_regular(path.resolve(), str(path)) as file:
            target = file.read(_MAX_LINK_BYTES).decode("utf-8", "replace").strip()
        folder = (path.parent / target).resolve()
        if target and folder.is_relative_to(path.parent.resolve()) and (folder / RUN_FILE).is_file():
            return folder
    raise NotARunError(f"{path} is a file, not a run folder. Give the folder that contains {RUN_FILE}.")


def _not_a_run(path: Path) -> NotARunError:
    inner = [str(folder.relative_to(path)) for folder in run_folders(path)]
    if not inner:
        return NotARunError(f"{path} is not a run folder: it has no {RUN_FILE}. `sonde list` lists the runs.")
    return NotARunError(
        f"{path} is not a run but a folder of {len(inner)} {'run' if len(inner) == 1 else 'runs'}: "
        f"{_listed(inner)}. Name one of them, e.g. {path / inner[-1]}; "
        f"`sonde list --dir {path}` lists them all."
    )


def _find_by_name(text: str, dir: Path) -> Path:
    names: dict[str, list[tuple[float, Path]]] = {}
    for folder in run_folders(dir):
        created, labels = _labels(folder)
        for label in labels:
            names.setdefault(label, []).append((created, folder))
    if text == LATEST_LINK and names:  # the run it pointed to is gone
        return max(run for runs in names.values() for run in runs)[1].resolve()
    if text in names:
        return max(names[text])[1].resolve()
    found = {folder for label, runs in names.items() if label.startswith(text) for _, folder in runs}
    if len(found) == 1:
        return found.pop().resolve()
    if found:
        several = _listed(str(folder.relative_to(dir)) for folder in sorted(found))
        raise RunNotFoundError(f'"{text}" is ambiguous: {len(found)} runs match ({several}). Give more of the name.')
    if not names:
        raise RunNotFoundError(
            f'no run "{text}": there are no runs in {_shown(dir)} yet. Point to another folder with dir= or SONDE_DIR, '
            "or record a run with `sonde run train.py`."
        )
    near = {max(names[label]): label for label in reversed(difflib.get_close_matches(text, names, n=6, cutoff=0.5))}
    closest = f" Closest: {', '.join([*near.values()][:-4:-1])}." if near else ""
    raise RunNotFoundError(f'no run "{text}" in {_shown(dir)}.{closest} `sonde list` lists all runs.')


def _listed(names: Iterable[str]) -> str:
    """The first names, and the number of the others.

    >>> _listed(map(str, range(12)))
    '0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more'
    """
    every = list(names)
    more = f" and {len(every) - MAX_NAMED} more" if len(every) > MAX_NAMED else ""
    return f"{', '.join(every[:MAX_NAMED])}{more}"


def _shown(dir: Path) -> str:
    """The folder as people write it: `./runs` rather than `runs`."""
    return str(dir) if dir.is_absolute() or str(dir).startswith(".") else f"./{dir}"


def _labels(folder: Path) -> tuple[float, list[str]]:
    """The names of a run. A run whose run.json is damaged can still be found by its folder."""
    project = folder.parent.name
    try:
        manifest = read_manifest(folder)
    except SondeError:
        return 0.0, [folder.name, f"{project}/{folder.name}"]
    return manifest.created_time, [
        folder.name,
        f"{project}/{folder.name}",
        manifest.id,
        manifest.name,
        f"{manifest.project}/{manifest.name}",
    ]
