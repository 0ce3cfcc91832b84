"""Checks that all ranks of a job still have the same weights: each records a fingerprint at the same steps."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Final

from torch import Tensor, nn

from sonde.probe.outputs import is_plain_tensor
from sonde.probe.sharded import is_readable, local_of, placed
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


def part_fingerprints(model: nn.Module) -> dict[str, Tensor]:
    """Fingerprints of the parameters that this rank holds as a whole, and of its parts of the others."""
    made = {name: fingerprint(part for _, part in _grouped(model)[name]) for name in _GROUPS}
    return {name: value for name, value in made.items() if value is not None}


def part_keys(model: nn.Module) -> dict[str, str]:
    """For each of these fingerprints, what it is of: ranks with the same key hold the same, and must agree."""
    return {
        name: f"{zlib.crc32(repr([described for described, _ in group]).encode()):08x}"
        for name, group in _grouped(model).items()
    }


_GROUPS: Final = ("fingerprint", "fingerprint_of_parts")


def _grouped(model: nn.Module) -> dict[str, list[tuple[object, Tensor]]]:
    found: dict[str, list[tuple[object, Tensor]]] = {name: [] for name in _GROUPS}
    for name, parameter in model.named_parameters():
        shard = placed(parameter).shard
        if is_readable(parameter):
            found[_GROUPS[shard.parts > 1]].append(((name, shard.part, shard.parts), local_of(parameter)))
    return found


def later_event(value: Tensor, step: int) -> Callable[[], Event]:
    """The fingerprint of another rank as an event, once it has arrived."""
    pending, now = PendingScalars([value]), time.time()

    def resolve() -> Event:
        (number,) = pending.resolve()
        return Event(type="fingerprint", message="weights", step=step, time=now, details={"value": number})

    return resolve
