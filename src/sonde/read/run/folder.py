"""Find run folders by name and open files inside them. A run folder may be hostile: nothing outside it is ever read."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from sonde.errors import CorruptError, NotARunError, RunError, RunNotFoundError, SondeError
from sonde.read.run.manifest import Manifest, parse_manifest
from sonde.schema.layout import LATEST_LINK, RUN_FILE

MAX_RUN_FILE_BYTES: Final = 64 << 20
_MAX_LINK_BYTES: Final = 4096


def default_dir() -> Path:
    """Where runs are kept: SONDE_DIR, else `runs`."""
    return Path(os.environ.get("SONDE_DIR") or "runs")


def inside(run: Path, *parts: str) -> Path:
    """A path in a run folder; one that leaves it, by name or by a link, is refused."""
    path = run.joinpath(*parts)
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name with NUL
        raise CorruptError(f"{run.name}: {'/'.join(parts)!r} cannot be followed: {error}.") from error
    if not real.is_relative_to(run.resolve()):
        raise CorruptError(f"{run.name}: {'/'.join(parts)!r} leads out of the run folder (to {real}); it is not read.")
    return real


def open_inside(run: Path, *parts: str) -> BinaryIO:
    """A regular file of a run folder, opened for reading. FileNotFoundError when it is not there."""
    path = inside(run, *parts)
    # O_NONBLOCK: opening a pipe that somebody put there must not wait for ever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptError(f"{run.name}: {'/'.join(parts)!r} is not a regular file; it is not read.")
    return os.fdopen(descriptor, "rb")


def read_manifest(run: Path) -> Manifest:
    """The run's run.json, checked."""
    try:
        with open_inside(run, RUN_FILE) as file:
            text = file.read(MAX_RUN_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _not_a_run(run) from None
    except OSError as error:
        raise RunError(f"{run / RUN_FILE} cannot be read: {error.strerror}. Check its permissions.") from error
    if len(text) > MAX_RUN_FILE_BYTES:
        raise CorruptError(f"{run / RUN_FILE} is larger than {MAX_RUN_FILE_BYTES >> 20} MiB; it is not read.")
    return parse_manifest(text, where=str(run / RUN_FILE))


def run_folders(dir: Path) -> Iterator[Path]:
    """Every run folder below `dir`: `<dir>/<project>/<run>` and `<dir>/<run>`. Hidden folders are passed over."""
    for folder in _folders(dir):
        if (folder / RUN_FILE).is_file():
            yield folder
        else:
            yield from (inner for inner in _folders(folder) if (inner / RUN_FILE).is_file())


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
    """The folder of a run named by a folder, an id, "project/name", a unique prefix of these, or "latest".

    Of several runs with exactly this name, the newest.
    """
    dir = default_dir() if dir is None else dir
    text = os.fspath(name)
    if not text or "\0" in text:
        raise RunNotFoundError(f'a run is named by a folder, an id, "project/name" or "latest"; got {text!r}.')
    for path in (Path(text), dir / text):
        folder = _as_folder(path)
        if folder is not None:
            return folder
    return _find_by_name(text, dir)


def _as_folder(path: Path) -> Path | None:
    """The run folder at this path, None when nothing is there; something else there is an error."""
    try:
        if path.is_file():
            return _follow_text_link(path)
        if not path.is_dir():
            return None
        folder = path.resolve()
    except (OSError, RuntimeError, ValueError):  # a name too long for a file system is still a name
        return None
    if not (folder / RUN_FILE).exists():
        raise _not_a_run(path)
    return folder


def _follow_text_link(path: Path) -> Path:
    """Where links are impossible, `latest` is a file that holds a relative path."""
    if path.name == RUN_FILE:
        return path.parent.resolve()
    if path.name == LATEST_LINK:
        with path.open("rb") as file:
            target = file.read(_MAX_LINK_BYTES).decode("utf-8", "replace").strip()
        folder = (path.parent / target).resolve()
        if target and folder.is_relative_to(path.parent.resolve()) and (folder / RUN_FILE).is_file():
            return folder
    raise NotARunError(f"{path} is a file, not a run folder. Give the folder that holds {RUN_FILE}.")


def _not_a_run(path: Path) -> NotARunError:
    inner = [str(folder.relative_to(path)) for folder in run_folders(path)]
    if not inner:
        return NotARunError(f"{path} is not a run folder: it has no {RUN_FILE}. `sonde list` shows the runs there are.")
    more = f" and {len(inner) - 3} more" if len(inner) > 3 else ""
    return NotARunError(
        f"{path} is not a run but a folder of {len(inner)} runs: {', '.join(inner[:3])}{more}. Open one of them, "
        f'as in  sonde.open("{path / inner[-1]}"), or list them with  sonde.runs("{path}").'
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
        several = ", ".join(str(folder.relative_to(dir)) for folder in sorted(found)[:5])
        raise RunNotFoundError(f'"{text}" may mean any of {len(found)} runs: {several}. Give more of the name.')
    if not names:
        raise RunNotFoundError(f'no run "{text}": there are no runs in "{dir}". Set SONDE_DIR, or give dir=.')
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.5) or sorted(names)[-3:]
    raise RunNotFoundError(f'no run "{text}" in "{dir}". Nearest: {", ".join(near)}. `sonde list` shows all.')


def _labels(folder: Path) -> tuple[float, list[str]]:
    """What a run may be called. A run whose run.json is damaged is still found by its folder."""
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
