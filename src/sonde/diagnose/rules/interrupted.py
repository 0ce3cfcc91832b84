"""Someone, or a job scheduler, stopped the run."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.diagnose.measures.ending import Kind, ending
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window


@rule(severity="info", is_measured=True)
def interrupted(window: Window) -> Iterator[Found]:
    """The run was stopped from outside before it finished."""
    end = ending(window)
    if end is None or end.kind is not Kind.STOPPED:
        return
    yield Found(
        f"The run was stopped {end.when}: {end.reason or 'the signal is unknown'}.",
        step=end.step,
        confidence=1.0,
        remedy="Continue it: `sonde.init(..., resume='latest')` after loading a checkpoint. A scheduler that sends "
        "SIGTERM has reached the job's time limit.",
    )
