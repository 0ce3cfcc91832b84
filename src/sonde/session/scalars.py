"""Passes the numbers of `log` to the writer: plain ones, and those still on a device.

A value that cannot be recorded costs that value and one warning, never the others in its call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sonde.schema.records import Event, ScalarsRecord
from sonde.session.numbers import NotANumberError, flattened, take
from sonde.session.recording import Recording

if TYPE_CHECKING:
    from sonde.reduce.scalars import PendingScalars
    from sonde.session.training.thread import TrainingThread
    from sonde.session.training.writer import StepWriter
    from sonde.write.writer import Writer

MAX_STEP: Final = 1 << 53
"""Above this, neighbouring integers are the same number in JSON and in a browser."""


def log_values(recording: Recording, training: TrainingThread, values: Any, step: Any = None) -> None:
    """Record numbers that belong to this training thread, whichever thread calls. Never raises."""
    if recording.is_finished:
        recording.warn_once(
            "log after finish", "log() after finish() records nothing. Start a new run with sonde.init()."
        )
        return
    try:
        _put_logged(recording, training, values, step)
    except Exception as error:  # noqa: BLE001 - our failure must not end their training
        recording.breaker("log", error)


def _put_logged(recording: Recording, training: TrainingThread, values: Any, step: Any = None) -> None:
    """Pass them to the writer. A value that cannot be recorded causes one warning and is left out; it does not count as
    an internal failure. Without a step, values belong to the current step of the training thread."""
    at = _step_of(recording, step, training)
    if not isinstance(values, Mapping):
        _leave_out(recording, "values", f'a mapping from names to numbers, log({{"loss": loss}}), not {_short(values)}')
    elif at is None:
        _leave_out(recording, "step", f"a whole number as step=, not {_short(step)}")
    else:
        writer = recording.writer if step is not None else training.step_writer
        put_numbers(recording, _taken(recording, values), at, writer, made=training.steps.number)


def put_numbers(
    recording: Recording,
    taken: Mapping[str, Any],
    step: int,
    writer: Writer | StepWriter | None = None,
    *,
    made: int | None = None,
) -> None:
    """Record floats, `Late` numbers, and one-element tensors on a GPU by name. `made` is the current step."""
    writer = writer or recording.writer
    taken = _sent(recording, taken)
    if not taken:
        return
    ids = np.array([recording.writer.scalar_id(name) for name in taken], np.int32)
    steps = np.full(len(ids), step, np.int64)
    times = np.full(len(ids), time.time())
    values = np.array([value if isinstance(value, float) else np.nan for value in taken.values()])
    made = recording.step_number if made is None else made
    counted = np.full(len(ids), made, np.int64) if step > made else None
    record = ScalarsRecord(ids, steps, times, values, counted)
    late = [(place, name, value) for place, (name, value) in enumerate(taken.items()) if callable(value)]
    if not late:
        writer.put(record, 32 * len(ids), step=step)
        return

    def resolve() -> list[ScalarsRecord | Event]:
        is_known, events = np.ones(len(ids), bool), []
        for place, name, number in late:
            try:
                values[place] = number()
            except Exception as error:  # noqa: BLE001 - a value that cannot be read must not cost the others
                is_known[place] = False
                events.append(recording.warned(f"log {name}", _refusal(name, error)))
        return [record.where(is_known), *(event for event in events if event is not None)]

    writer.put(resolve, 64 * len(ids), step=step, stream="scalars")


def _taken(recording: Recording, values: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        for name, value in flattened(values):
            if name in found:
                recording.warn_once(
                    f"log twice {name}", f'log() got "{name}" twice in one call; the last value is recorded.'
                )
            try:
                found[name] = take(value)
            except Exception as error:  # noqa: BLE001 - reading a user's value may fail in any way
                recording.warn_once(f"log {name}", _refusal(name, error))
    except Exception as error:  # noqa: BLE001 - so may reading a user's mapping
        recording.warn_once("log mapping", f"log() could not read every name in a mapping: {_in_words(error)}.")
    return found


def _sent(recording: Recording, taken: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tensors on a GPU become `Late` numbers, all copied to the host in one transfer."""
    on_gpu = {name: value for name, value in taken.items() if getattr(value, "is_cuda", False)}
    if not on_gpu:
        return taken
    from sonde.reduce.scalars import PendingScalars

    others = {name: value for name, value in taken.items() if name not in on_gpu}
    try:
        transfer = _ScalarTransfer(PendingScalars(list(on_gpu.values())))
    except Exception as error:  # noqa: BLE001 - a failed device is not an internal failure
        for name in on_gpu:
            recording.warn_once(f"log {name}", _refusal(name, error))
        return others
    return {**others, **{name: partial(transfer.number, place) for place, name in enumerate(on_gpu)}}


class _ScalarTransfer:
    """Numbers copied from a device together, or not at all: a failed device is waited for only once."""

    def __init__(self, pending: PendingScalars) -> None:
        self._pending = pending
        self._found: list[float] | None = None
        self._error: Exception | None = None

    def number(self, place: int) -> float:
        if self._found is None and self._error is None:
            try:
                self._found = self._pending.resolve()
            except Exception as error:  # noqa: BLE001 - raised again for each of them
                self._error = error
        if self._found is None:
            raise self._error or RuntimeError("nothing arrived")
        return self._found[place]


def _step_of(recording: Recording, step: Any, training: TrainingThread) -> int | None:
    made = training.steps.number
    if step is None:
        return made
    try:
        at = int(step) if isinstance(step, int | str) else _whole(step)
    except Exception:  # noqa: BLE001 - whatever it is, it is not a step
        return None
    if abs(at) > MAX_STEP:
        return None
    if at > made and not recording.is_logged_ahead:
        recording.is_logged_ahead = True
        recording.writer.note(logged_ahead=True)  # the user's own count: it does not say where to resume
    return at


def _whole(step: Any) -> int:
    """Waits for a step that is on a device: nothing can be recorded without it."""
    taken = take(step)
    number = float(taken() if callable(taken) and not hasattr(taken, "is_cuda") else taken)
    if not number.is_integer():
        raise NotANumberError("not a whole number")
    return int(number)


def _leave_out(recording: Recording, key: str, wanted: str) -> None:
    recording.warn_once(f"log, {key}", f"log() takes {wanted}. This call was ignored.")


def _refusal(name: str, error: Exception) -> str:
    return f'log() did not record "{name}": {_in_words(error)}.'


def _in_words(error: Exception) -> str:
    """A sonde error is a sentence; any other error is shown with its type."""
    if isinstance(error, NotANumberError):
        return str(error)
    return f"it cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"[:300]


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str | float | int) else type(value).__name__
