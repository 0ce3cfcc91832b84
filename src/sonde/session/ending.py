"""How a run ended, told by the exception its program ended with."""

from __future__ import annotations

from sonde.schema.layout import RunStatus


def status_of(error: BaseException | None) -> tuple[RunStatus, str]:
    """How a run ended that ended with this exception."""
    if error is None or (isinstance(error, SystemExit) and not error.code) or isinstance(error, GeneratorExit):
        return "finished", ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt"
    return "crashed", f"{type(error).__name__}: {error}"[:2000]


def keep_exit_by_signal() -> None:
    """Python ends with SIGINT's exit code only if the interrupt was the last thing that left a piece of top-level code.

    Modules imported while we said goodbye were such pieces. This one, again, ends in an interrupt.
    """
    try:
        exec("raise KeyboardInterrupt")  # noqa: S102 - our own words
    except KeyboardInterrupt:
        return
