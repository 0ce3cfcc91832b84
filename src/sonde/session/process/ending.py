"""The status of a run from the exception or exit that ended its program, and a description of that exception."""

from __future__ import annotations

import shlex
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, Final

from sonde.config import Settings
from sonde.schema.layout import RunStatus, ending_of
from sonde.schema.records import text_of
from sonde.session.process.exits import exits
from sonde.write.environment import working_directory

_MAX_TEXT: Final = 2000
_MAX_FRAMES: Final = 30
_MAX_TRACEBACK: Final = 8000
_OWN: Final = str(Path(__file__).parents[2])


def last_error() -> BaseException | None:
    """The exception that is about to end the program; None if it reached its last line."""
    if hasattr(sys, "ps1"):
        return exits.last()  # in an interactive session an old error says nothing about the end
    # The first is the exception that a multiprocessing child exits with.
    return sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or exits.last()


def status_of(error: BaseException | None) -> tuple[RunStatus, str]:
    if error is None or isinstance(error, GeneratorExit):
        return "finished", ""
    if isinstance(error, SystemExit):
        return _of_exit(error.code)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "crashed", f"{type(error).__name__}: {text_of(error)}"[:_MAX_TEXT]


def _of_exit(code: object) -> tuple[RunStatus, str]:
    """The exit code for an argument of `sys.exit`, as in Python: None is 0, a string is 1."""
    if code is None or isinstance(code, int):
        return ending_of(int(code or 0) & 0xFF)
    return "crashed", f"exit code 1: {text_of(code)}"[:_MAX_TEXT]


def describe(error: BaseException | None) -> dict[str, Any] | None:
    """Describe the exception that ended the program: its traceback, the user's line that raised it, and the
    memory in use. None if the program did not end by an exception. Keeps no reference to it."""
    if error is None or isinstance(error, SystemExit | GeneratorExit | KeyboardInterrupt):
        return None
    summary = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES, compact=True)
    frame = next((frame for frame in reversed(summary.stack) if _is_users(frame.filename)), None)
    return {
        "type": type(error).__name__,
        "message": text_of(error)[:_MAX_TEXT],
        "traceback": "".join(summary.format())[-_MAX_TRACEBACK:],
        "file": "" if frame is None else shown(Path(frame.filename).absolute()),
        "line": None if frame is None else frame.lineno,
        "function": "" if frame is None else frame.name,
        "errno": getattr(error, "errno", None),
        "gpu_mib": _gpu_mib(),
    }


def _is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor of an installed package, nor ours."""
    paths = sysconfig.get_paths()
    known = (paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], _OWN, "<frozen")
    return not file.startswith(known)


def _gpu_mib() -> dict[str, float] | None:
    """Memory of the current GPU in MiB, by the allocator's own count: nothing waits for the device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    counts = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak": torch.cuda.max_memory_allocated(),
    }
    return {name: count / (1 << 20) for name, count in counts.items()}


def shown(path: Path) -> str:
    """A path as a person would type it from the working directory.

    >>> shown(Path("runs/gpt").absolute())
    'runs/gpt'
    """
    here = working_directory()
    return str(path.relative_to(here) if here is not None and path.is_relative_to(here) else path)


def dashboard_command(path: Path) -> str:
    """The command that opens the dashboard with a run and its siblings, as typed in the working directory.

    >>> dashboard_command(Path("runs/gpt/one").absolute()), dashboard_command(Path("/data/my runs/gpt/one"))
    ('sonde ui', "sonde ui '/data/my runs'")
    """
    folder = shown(path.parents[1])
    return "sonde ui" if folder == str(Settings.model_fields["dir"].default) else f"sonde ui {shlex.quote(folder)}"


def keep_exit_by_signal() -> None:
    """Python exits with SIGINT's code only if the interrupt was the last exception to leave top-level code.

    Modules imported while the session ended were such code. This raises another interrupt in its place.
    """
    try:
        exec("raise KeyboardInterrupt")  # noqa: S102 - a constant string
    except KeyboardInterrupt:
        return
