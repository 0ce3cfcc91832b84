"""Format and destination of an export, checked before anything is read."""

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
"""Extensions of formats that are not written here; a file of another kind under such a name could not be opened."""
_BY_ENDING: Final = {f".{name}": SHORT.get(name, name) for name in (*FORMATS, *SHORT, *FOREIGN)}


def choose_format(what: str, format: str | None, output: Path | None, known: Collection[str], default: str) -> str:
    """The given format, or that of the extension of the file; the two must agree.

    >>> choose_format("scalars", None, Path("loss.csv"), ["csv", "parquet"], "parquet")
    'csv'
    """
    said = SHORT.get(format, format) if format else None
    ending = _ending(output)
    chosen = said or ending or default
    if chosen not in known:
        raise UnknownNameError(f"format for {'all tables' if what == 'all' else what}", chosen, known)
    if said and ending and said != ending:
        raise UsageError(
            f"the format {said} does not match the extension of {output} ({ending}). Change format= or output=."
        )
    return chosen


def refuse_file_for_many(output: Path | None, parts: str, format: str, instead: str) -> None:
    """Reject a file name where a folder is needed: a folder called `model.safetensors` would look like the file."""
    if _ending(output) is not None:
        raise UsageError(
            f"{output} is a file name, but {format} writes {parts} as one file each. Name a folder with output=, "
            f"{instead}, or set format= to h5, which holds them all in one file."
        )


def refuse_place(paths: Collection[Path], *, force: bool, may_be_folder: bool = False) -> None:
    """Reject a folder, and an existing file unless `force`."""
    for path in dict.fromkeys(paths):
        if path.is_dir() and not may_be_folder:
            raise UsageError(f"{path} is a folder. Name a file with output=.")
        if path.exists() and not force:
            raise UsageError(
                f"{path} already exists. Choose another file with output=, or overwrite it with force=True."
            )


def require_folder(path: Path) -> None:
    """Fail if the parent folder is missing, naming that folder rather than a temporary file in it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "The folder to export to does not exist", str(path.parent))


@contextmanager
def explaining_a_full_disk(path: Path) -> Iterator[None]:
    """Turn a bare "No space left on device" into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise RunError(
            f"the disk is full: cannot write {path}. Free some space, or choose another place with output=. A long "
            "export resumes when you run the same command again."
        ) from error


def _ending(output: Path | None) -> str | None:
    return None if output is None else _BY_ENDING.get(output.suffix.lower())
