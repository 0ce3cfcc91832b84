"""How a run ended, told by the exception its program ended with, and what is said then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sonde.schema.layout import RunStatus

if TYPE_CHECKING:
    from sonde.session.session import Session


def status_of(error: BaseException | None) -> tuple[RunStatus, str]:
    """How a run ended that ended with this exception."""
    if error is None or (isinstance(error, SystemExit) and not error.code) or isinstance(error, GeneratorExit):
        return "finished", ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "crashed", f"{type(error).__name__}: {error}"[:2000]


def farewell(session: Session, status: RunStatus, *, has_faults: bool) -> str:
    """The last line: how it went, what it cost, what is missing, and where to look."""
    parts = [f"{status} after {session.step_number} steps"]
    if session.governing.overhead:
        parts.append(f"{session.governing.overhead:.1%} of the time was sonde's")
    dropped = sum(session.writer.dropped.values())
    if dropped:
        parts.append(f"{dropped} records dropped")
    if session.writer.degraded:
        parts.append(f"not everything could be written: {session.writer.degraded}")
    return f"{', '.join(parts)}.   sonde {'diagnose' if has_faults else 'show'} {session.path}"


def keep_exit_by_signal() -> None:
    """Python ends with SIGINT's exit code only if the interrupt was the last thing that left a piece of top-level code.

    Modules imported while we said goodbye were such pieces. This one, again, ends in an interrupt.
    """
    try:
        exec("raise KeyboardInterrupt")  # noqa: S102 - our own words
    except KeyboardInterrupt:
        return
