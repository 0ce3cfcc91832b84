"""The writer for values logged without a step: they may wait until their step is known."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sonde.schema.layout import Stream
from sonde.schema.records import Event, ScalarsRecord, StatsRecord

if TYPE_CHECKING:
    from sonde.session.training.count import Steps
    from sonde.write.writer import Writer


class StepWriter:
    """Has the `put` of the writer, for values logged at the steps of one thread."""

    def __init__(self, writer: Writer, steps: Steps) -> None:
        self._writer, self._steps = writer, steps

    def put(self, item: Any, num_bytes: int, *, step: int, stream: Stream = "stats") -> bool:
        """Queue a record, or a function that creates one. A waiting record is not dropped, so the result is True."""
        steps, writer = self._steps, self._writer

        def put(at: int) -> bool:
            return writer.put(item if at == step else at_step(item, at), num_bytes, step=at, stream=stream)

        return steps.wait(put) or put(steps.last)


def at_step(item: Any, step: int) -> Any:
    """The same record, or function that creates one, at another step."""
    if callable(item):
        return lambda: at_step(item(), step)
    if isinstance(item, list):
        return [at_step(one, step) for one in item]
    if isinstance(item, ScalarsRecord):
        return replace(item, steps=np.full_like(item.steps, step))
    if isinstance(item, StatsRecord | Event):
        return replace(item, step=step)
    return item
