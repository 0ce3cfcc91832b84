"""Where a report goes, in which format, and what it may replace: only a report gives way to a report."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from sonde.errors import UnknownNameError, UsageError

Format = Literal["html", "md", "json", "pdf"]
FORMATS: Final[tuple[Format, ...]] = ("html", "md", "json", "pdf")
_ENDINGS: Final[dict[str, Format]] = {
    "html": "html", "htm": "html", "md": "md", "markdown": "md", "json": "json", "pdf": "pdf",
}  # fmt: skip
MARKS: Final[dict[Format, tuple[bytes, ...]]] = {
    "html": (b'<meta name="generator" content="sonde report">',),
    "md": (b"<!-- sonde report -->",),
    "json": (b'"sonde_report"',),
    "pdf": (b"% sonde report",),
}
"""What tells a report from somebody's file; in a PDF it stands at the end."""
_HEAD_BYTES: Final = 4096


def pick_format(output: Path | None, asked: str | None) -> Format:
    """What was asked for, else what the ending says, else HTML."""
    if asked is not None:
        if asked not in FORMATS:
            raise UnknownNameError("format", asked, FORMATS)
        return next(format for format in FORMATS if format == asked)
    if output is None or not output.suffix:
        return "html"
    ending = output.suffix[1:].lower()
    if ending not in _ENDINGS:
        raise UsageError(
            f'the ending of "{output}" says no format of a report. Name it with --format: {", ".join(FORMATS)}.'
        )
    return _ENDINGS[ending]


def default_path(run: Path, format: Format) -> Path:
    """In the folder one is in, named after the run."""
    return Path(f"{run.name}-report.{format}")


def refuse_overwriting(path: Path, *, force: bool) -> None:
    """A folder is never replaced, and a file that is no report only when that is asked for."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Name a file with -o.")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}. Make it first, or name another file with -o.")
    if path.exists() and not force and not is_report(path):
        raise UsageError(f"{path} is there and is not a report. Name another file with -o, or replace it with --force.")


def is_report(path: Path) -> bool:
    """Whether a file is one of ours."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(b"%PDF"):
            head += file.read()
    return any(mark in head for marks in MARKS.values() for mark in marks)
