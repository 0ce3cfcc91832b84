"""Numbers that `log` was given: plain ones, and tensors that are still on a device and are not waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sonde.schema.records import ScalarsRecord
from sonde.session.numbers import as_float, flattened, is_number

if TYPE_CHECKING:
    from sonde.session.session import Session

MAX_STEP: Final = 1 << 53
"""Beyond it neighbours are one number to JSON and to a browser."""


def put_logged(session: Session, values: Any, step: Any = None) -> None:
    """Hand them to the writer. What cannot be recorded is named once and left out: it is no failure of ours."""
    at = _step_of(session, step)
    if not isinstance(values, Mapping):
        _leave_out(session, "values", f'a mapping of names to numbers, log({{"loss": loss}}), not {_short(values)}')
    elif at is None:
        _leave_out(session, "step", f"a whole number as its step, not {_short(step)}")
    else:
        _put_all(session, values, at)


def _step_of(session: Session, step: Any) -> int | None:
    if step is None:
        return session.step_number
    try:
        at = int(step)
    except (TypeError, ValueError, OverflowError):
        return None
    if at > session.step_number and not session.is_logged_ahead:
        session.is_logged_ahead = True
        session.writer.note(logged_ahead=True)  # a count of the user's own: it says nothing of where to go on
    return at if abs(at) <= MAX_STEP else None


def _put_all(session: Session, values: Mapping[str, Any], step: int) -> None:
    names: list[str] = []
    numbers: list[float] = []
    tensors: list[tuple[int, Any]] = []
    for name, value in flattened(values):
        if hasattr(value, "detach") and getattr(value, "numel", lambda: 0)() == 1:
            tensors.append((len(names), value))
            value = np.nan
        elif not is_number(value):
            session.warn_once(
                f"log {name}", f'log() takes numbers; "{name}" is {type(value).__name__} and was left out.'
            )
            continue
        names.append(name)
        numbers.append(as_float(value))
    if names:
        _put(session, names, numbers, tensors, step)


def _leave_out(session: Session, key: str, wanted: str) -> None:
    session.warn_once(f"log, {key}", f"log() takes {wanted}. It was left out.")


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str | float | int) else type(value).__name__


def _put(session: Session, names: list[str], numbers: list[float], tensors: list[tuple[int, Any]], step: int) -> None:
    ids = np.array([session.writer.scalar_id(name) for name in names], np.int32)
    steps = np.full(len(names), step, np.int64)
    times = np.full(len(names), time.time())
    values = np.array(numbers)
    if not tensors:
        session.writer.put(ScalarsRecord(ids, steps, times, values), 32 * len(names), step=step)
        return
    from sonde.reduce.scalars import PendingScalars

    pending = PendingScalars([tensor for _, tensor in tensors])

    places = [place for place, _ in tensors]  # the tensors themselves are not kept

    def resolve() -> ScalarsRecord:
        values[places] = pending.resolve()
        return ScalarsRecord(ids, steps, times, values)

    session.writer.put(resolve, 64 * len(names), step=step, stream="scalars")
