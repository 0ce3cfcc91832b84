"""The attempts of a run as a table, and the check of an attempt's number."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from sonde.errors import UsageError
from sonde.read.run.sharded import open_state
from sonde.read.run.state import RunState
from sonde.schema.attempts import Attempt

_ATTEMPTS = pa.schema(
    [
        ("attempt", pa.int64()),
        ("first_step", pa.int64()),
        ("last_step", pa.int64()),
        ("started", pa.timestamp("us", tz="UTC")),
        ("reason", pa.string()),
    ]
)


def attempt_table(state: RunState) -> pa.Table:
    """All attempts in order, including those after the selected one. A run of format 1 and an empty run have one."""
    attempts = state.catalog.require().attempts or (Attempt(number=0, time=state.manifest.created_time),)
    columns = [
        [attempt.number for attempt in attempts],
        [attempt.first_step for attempt in attempts],
        [last_step_of(state, attempt.number) for attempt in attempts],
        [datetime.fromtimestamp(attempt.time, UTC) for attempt in attempts],
        [attempt.reason for attempt in attempts],
    ]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, _ATTEMPTS, strict=True)], schema=_ATTEMPTS)


def last_step_of(state: RunState, number: int) -> int:
    """The last step that an attempt recorded, whether abandoned or not."""
    return open_state(state.run, number).last_step()


def check_attempt(state: RunState, number: int) -> int:
    """Check the number of an attempt; a negative one counts from the last."""
    count = max(len(state.catalog.require().attempts), 1)
    if not -count <= number < count:
        known = "0" if count == 1 else f"0 to {count - 1}"
        raise UsageError(f"no attempt {number} in {state.manifest.project}/{state.manifest.name}. It has: {known}.")
    return number % count
