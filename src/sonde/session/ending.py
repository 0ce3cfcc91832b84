"""The status of a run from the exception or exit that ended its program, and the last line it prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sonde.schema.layout import RunStatus, ending_of
from sonde.schema.records import text_of
from sonde.session.exits import exits
from sonde.write.environment import working_directory

if TYPE_CHECKING:
    from sonde.session.session import Session


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


def final_status(session: Session, status: RunStatus, *, has_faults: bool) -> str:
    """The last line: how it went, what it cost, what is missing, and where to look."""
    is_known = session.training.steps.is_count_known
    parts = [f"{status} after {session.step_number} steps" if is_known else f"{status}; its steps were not counted"]
    if session.overhead:
        parts.append(f"{session.overhead:.1%} of the time was sonde's")
    dropped = sum(session.writer.dropped.values())
    if dropped:
        parts.append(f"{dropped} records dropped")
    if not session.writer.is_done:
        parts.append("the disk was too slow to confirm the last records")
    elif session.writer.degraded:
        parts.append(f"not everything could be written: {session.writer.degraded}")
    return f"{', '.join(parts)}.   sonde {'diagnose' if has_faults else 'show'} {shown(session.path)}"


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

    Modules imported while we said goodbye were such pieces. This one, again, ends in an interrupt.
    """
    try:
        exec("raise KeyboardInterrupt")  # noqa: S102 - our own words
    except KeyboardInterrupt:
        return
