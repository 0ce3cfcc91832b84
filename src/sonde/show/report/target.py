"""The path and format of a report. A report may overwrite only another report."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from sonde.errors import UnknownNameError, UsageError

Format = Literal["html", "md", "json", "txt", "pdf"]
FORMATS: Final[tuple[Format, ...]] = ("html", "md", "json", "txt", "pdf")
_ENDINGS: Final[dict[str, Format]] = {
    "html": "html", "htm": "html", "md": "md", "markdown": "md", "json": "json", "txt": "txt", "pdf": "pdf",
}  # fmt: skip
MARKS: Final[dict[Format, tuple[bytes, ...]]] = {
    "html": (b'<meta name="generator" content="sonde report">',),
    "md": (b"<!-- sonde report -->",),
    "json": (b'"sonde_report"',),
    "txt": (b"\n\nTraining convergence\n--------------------\n",),
    "pdf": (b"% sonde report",),
}
"""Marks by which reports are recognised; in a PDF the mark is at the end."""
_HEAD_BYTES: Final = 4096


def pick_format(output: Path | None, asked: str | None) -> Format:
    """The requested format, or the one of the extension, or HTML."""
    if asked is not None:
        if asked not in FORMATS:
            raise UnknownNameError("format", asked, FORMATS)
        return next(format for format in FORMATS if format == asked)
    if output is None or not output.suffix:
        return "html"
    ending = output.suffix[1:].lower()
    if ending not in _ENDINGS:
        raise UsageError(
            f'cannot tell the report format from "{output}". Choose one with format=: {", ".join(FORMATS)}.'
        )
    return _ENDINGS[ending]


def default_path(run: Path, format: Format) -> Path:
    """The default path: in the current folder, named after the run."""
    return Path(f"{run.name}-report.{format}")


def refuse_overwriting(path: Path, *, force: bool) -> None:
    """Refuse to overwrite a folder, or (unless `force`) a file that is not a report."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Name a file with output=.")
    if not path.parent.is_dir():
        raise UsageError(f"no folder {path.parent}. Create it first, or choose another file with output=.")
    if path.exists() and not force and not is_report(path):
        raise UsageError(
            f"{path} already exists and is not a report. Choose another file with output=, or overwrite it with "
            "force=True."
        )


def is_report(path: Path) -> bool:
    """Whether a file is a report written by sonde."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(b"%PDF"):
            head += file.read()
    return any(mark in head for marks in MARKS.values() for mark in marks)
