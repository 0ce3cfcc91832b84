"""The status of a run from the exception or exit that ended its program."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from sonde.config import Settings
from sonde.schema.layout import RunStatus, ending_of
from sonde.schema.records import text_of
from sonde.session.process.exits import exits
from sonde.write.environment import working_directory


def last_error() -> BaseException | None:
    """The exception that is about to end the program; None if it reached its last line."""
    if hasattr(sys, "ps1"):
        return exits.last()  # in an interactive session an old error says nothing about the end
    # The first is the exception that a multiprocessing child exits with.
    return sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or exits.last()


def status_of(error: BaseException | None) -> tuple[RunStatus, str]:
    """The status of a run that ended with this exception."""
    if error is None or isinstance(error, GeneratorExit):
        return "finished", ""
    if isinstance(error, SystemExit):
        return _of_exit(error.code)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "crashed", f"{type(error).__name__}: {text_of(error)}"[:2000]


def _of_exit(code: object) -> tuple[RunStatus, str]:
    """The exit code for an argument of `sys.exit`, as in Python: None is 0, a string is 1."""
    if code is None or isinstance(code, int):
        return ending_of(int(code or 0) & 0xFF)
    return "crashed", f"exit code 1: {text_of(code)}"[:2000]


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
