"""The status of a run from the exception or exit that ended its program; and lines on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

from sonde.schema.layout import RunStatus, ending_of
from sonde.schema.records import text_of
from sonde.session.process.exits import exits
from sonde.write.environment import working_directory


def last_error() -> BaseException | None:
    """What ends the program that is about to end; None where it is its last line."""
    if hasattr(sys, "ps1"):
        return exits.last()  # in an interactive session an old error says nothing about the end
    # The first is what a child of multiprocessing's is on its way out with.
    return sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or exits.last()


def status_of(error: BaseException | None) -> tuple[RunStatus, str]:
    """How a run ended that ended with this exception."""
    if error is None or isinstance(error, GeneratorExit):
        return "finished", ""
    if isinstance(error, SystemExit):
        return _of_exit(error.code)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "crashed", f"{type(error).__name__}: {text_of(error)}"[:2000]


def _of_exit(code: object) -> tuple[RunStatus, str]:
    """As Python makes a code of what an exit was given: nothing is 0, a text is 1."""
    if code is None or isinstance(code, int):
        return ending_of(int(code or 0) & 0xFF)
    return "crashed", f"exit code 1: {text_of(code)}"[:2000]


def print_line(line: str) -> None:
    """To stderr. A closed one is no reason to stop, and there is no one to tell."""
    if sys.stderr is None:  # `print` would take stdout instead
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def shown(path: Path) -> str:
    """A path as a person would type it from here.

    >>> shown(Path("runs/gpt").absolute())
    'runs/gpt'
    """
    here = working_directory()
    return str(path.relative_to(here) if here is not None and path.is_relative_to(here) else path)


def keep_exit_by_signal() -> None:
    """Python ends with SIGINT's exit code only if the interrupt was the last thing that left a piece of top-level code.

    Modules imported while the session ended were such pieces. This one, again, ends in an interrupt.
    """
    try:
        exec("raise KeyboardInterrupt")  # noqa: S102 - our own words
    except KeyboardInterrupt:
        return
