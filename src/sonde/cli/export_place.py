"""In which format an export is written, and whether it can go where it is to go: said before anything is read."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sonde.errors import RunError, UnknownNameError, UsageError

SHORT: Final = {"h5": "hdf5", "feather": "arrow"}
FORMATS: Final = ("csv", "parquet", "arrow", "json", "hdf5", "safetensors", "npz")
FOREIGN: Final = ("pt", "pth", "bin", "ckpt", "pkl", "keras", "xlsx")
"""Endings that promise what is not written here; a file of another kind under such a name would open nowhere."""
_BY_ENDING: Final = {f".{name}": SHORT.get(name, name) for name in (*FORMATS, *SHORT, *FOREIGN)}


def choose_format(what: str, format: str | None, output: Path | None, known: Collection[str], default: str) -> str:
    """What --format says, or else the ending of -o; the two must not contradict each other.

    >>> choose_format("scalars", None, Path("loss.csv"), ["csv", "parquet"], "parquet")
    'csv'
    """
    said = SHORT.get(format, format) if format else None
    ending = _ending(output)
    chosen = said or ending or default
    if chosen not in known:
        raise UnknownNameError(f"format for {what}", chosen, known)
    if said and ending and said != ending:
        raise UsageError(f"by its ending {output} is {ending}, and --format says {said}. Change one of them.")
    return chosen


def refuse_file_for_many(output: Path | None, parts: str, format: str, instead: str) -> None:
    """Many files go into a folder; one that is called `model.safetensors` would be taken for the file itself."""
    if _ending(output) is not None:
        raise UsageError(
            f"{output} is one file, and {parts} are one file each in {format}. Name a folder with -o, {instead}, "
            "or choose --format h5, which holds them all."
        )


def refuse_place(paths: Collection[Path], *, force: bool, may_be_folder: bool = False) -> None:
    """A file that is there is replaced only by --force; the folder it goes to must be there."""
    for path in dict.fromkeys(paths):
        if path.is_dir() and not may_be_folder:
            raise UsageError(f"{path} is a folder. Name a file with -o.")
        if path.exists() and not force:
            raise UsageError(f"{path} is there already. Name another with -o, or replace it with --force.")


def require_folder(path: Path) -> None:
    """Of the file itself; said by its own name, not by that of a draft beside it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "There is no such folder to export to", str(path.parent))


@contextmanager
def explaining_a_full_disk(path: Path) -> Iterator[None]:
    """Libraries say no more than "No space left on device"."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RunError(
            f"the disk is full: {path} could not be written. Make room, or choose another place with -o. A long export "
            "goes on where it was when it is asked for again."
        ) from error


def _ending(output: Path | None) -> str | None:
    return None if output is None else _BY_ENDING.get(output.suffix.lower())
