"""Checks that all ranks of a job still have the same weights: each records a fingerprint at the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from torch import Tensor, nn

from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.inspect.bits import fingerprint
from sonde.reduce.scalars import PendingScalars
from sonde.schema.records import Event

EVERY: Final = 100
EARLY: Final = (1, 10)


def is_due(step: int) -> bool:
    """Whether to compare weights: not at step 0, before they may be broadcast; soon after it, then now and again."""
    return step in EARLY or (step > 0 and step % EVERY == 0)


def model_fingerprint(model: nn.Module) -> Tensor | None:
    """A fingerprint of the weights; None for sharded models, where each rank has its own weights."""
    parameters = list(model.parameters())
    return fingerprint(parameters) if parameters and all(map(is_plain_tensor, parameters)) else None


def later_event(value: Tensor, step: int) -> Callable[[], Event]:
    """The fingerprint of another rank as an event, once it has arrived."""
    pending, now = PendingScalars([value]), time.time()

    def resolve() -> Event:
        (number,) = pending.resolve()
        return Event(type="fingerprint", message="weights", step=step, time=now, details={"value": number})

    return resolve
