"""Where a value stopped being finite: every output of every module of every step is looked at, and nothing is stored
until one is not finite. Then the first places in the order of the forward pass become an event.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor

from sonde.probe.model import ModuleRef
from sonde.probe.outputs import floating_tensors
from sonde.reduce.inspect.finite import FiniteFlags, is_sampled
from sonde.reduce.scalars import PendingScalars
from sonde.schema.records import Event

MAX_EVENTS: Final = 50
"""A run that is lost says so often enough."""
MAX_SITES: Final = 8
MAX_HELD: Final = 1 << 12
"""Numbers after which those of whole forward passes are handed over before the step is over: it may never be."""
MAX_OPEN: Final = 1 << 16
"""Numbers of one forward pass, or of a model whose parts are called by themselves; more are not looked at."""


class Look(NamedTuple):
    """One tensor that was looked at: what it is of, in which micro-batch."""

    site: str
    role: str
    """"output" or "input" of the module."""
    micro_batch: int
    is_leaf: bool
    is_root: bool
    is_sampled: bool


class Looks(NamedTuple):
    """Some looks, and their numbers on the way to the host; micro-batches are counted from 0."""

    looks: list[Look]
    pending: PendingScalars
    num_micro_batches: int


class Later(Protocol):
    """Whatever calls a function off the training thread, and keeps the event it gives."""

    def put(self, item: Callable[[], Event | None], num_bytes: int, *, step: int) -> Any: ...


class NonFiniteWatch:
    """Looks at what modules take and give. On the training thread it only adds numbers up."""

    def __init__(self, writer: Later, root: str) -> None:
        self.writer, self.root = writer, root
        self._flags = FiniteFlags()
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Tensors already looked at in this forward pass, and their version: an output is the next one's input."""
        self._micro_batch = self._num_dropped = 0
        self._kept: list[Looks] = []
        self._num_events = 0

    def called(self, place: ModuleRef, is_leaf: bool, args: Any, output: Any, step: int) -> None:
        """A module ran in a training forward pass."""
        is_root = place.name == self.root
        for _, tensor in floating_tensors(args):
            self._look(place, "input", tensor, is_leaf, is_root, step)
        for _, tensor in floating_tensors(output):
            self._look(place, "output", tensor, is_leaf, is_root, step)
        if is_root:
            self._micro_batch += 1
            self._seen.clear()
            if len(self._flags) >= MAX_HELD:
                self._hand_over(step)

    def _look(self, place: ModuleRef, role: str, tensor: Tensor, is_leaf: bool, is_root: bool, step: int) -> None:
        if len(self._flags) >= MAX_OPEN:
            return
        seen = self._seen.get(id(tensor))
        if seen is not None and seen[0]() is tensor and seen[1] == tensor._version:
            return
        self._seen[id(tensor)] = weakref.ref(tensor), tensor._version
        in_part = is_sampled(tensor)
        look = Look(place.name, role, self._micro_batch, is_leaf, is_root, in_part)
        self._flags.add(look, tensor, step, in_part=in_part)

    def cut(self) -> Looks | None:
        """What was looked at since the last cut, taken out of the step."""
        num_micro_batches, self._micro_batch = self._micro_batch, 0
        self._seen.clear()
        taken = self._flags.take()
        return None if taken is None else Looks(*taken, num_micro_batches)

    def keep(self, looks: Looks) -> None:
        """It is of the step after all."""
        self._kept.append(looks)

    def drop(self, looks: Looks, step: int) -> None:
        """It is of no step; a value that was not finite is told of all the same."""
        self._put([looks], step, first=self._num_dropped)
        self._num_dropped += looks.num_micro_batches

    def emit(self, step: int) -> None:
        """The step is over."""
        self._hand_over(step)
        self._micro_batch = self._num_dropped = 0
        self._seen.clear()

    def _hand_over(self, step: int) -> None:
        """Give the numbers to the writer, which waits for them and says what it finds."""
        kept, self._kept = self._kept, []
        taken = self._flags.take()
        self._put(kept if taken is None else [*kept, Looks(*taken, 0)], step)
        self._micro_batch += sum(part.num_micro_batches for part in kept)

    def _put(self, parts: list[Looks], step: int, *, first: int = 0) -> None:
        if parts and self._num_events < MAX_EVENTS:
            looks = _numbered(parts, first)
            self.writer.put(self._later(looks, parts, step), 16 * len(looks), step=step)

    def _later(self, looks: list[Look], parts: list[Looks], step: int) -> Callable[[], Event | None]:
        now, pending = time.time(), [part.pending for part in parts]

        def say() -> Event | None:
            found = nonfinite_event(looks, [total for one in pending for total in one.resolve()], step, now)
            self._num_events += found is not None
            return found if self._num_events <= MAX_EVENTS else None

        return say


def _numbered(parts: list[Looks], first: int) -> list[Look]:
    """All looks, with the micro-batches counted through."""
    found: list[Look] = []
    for part in parts:
        found += [look._replace(micro_batch=look.micro_batch + first) for look in part.looks] if first else part.looks
        first += part.num_micro_batches
    return found


def nonfinite_event(looks: list[Look], totals: list[float], step: int, now: float) -> Event | None:
    """What was not finite, in the order of the forward pass; None when nothing was that matters.

    Infinity alone, inside, is what masks are made of: it matters once a NaN comes of it, or the model gives it out.
    """
    bad = [(look, total) for look, total in zip(looks, totals, strict=True) if not math.isfinite(total)]
    if not bad or not any(math.isnan(total) or look.is_root for look, total in bad):
        return None
    has_nan = any(math.isnan(total) for _, total in bad)
    first, value = bad[0]
    outputs = list(dict.fromkeys(look.site for look, _ in bad if look.role == "output" and look.is_leaf))
    details = {
        "site": first.site,
        "role": first.role,
        "came_with_data": first.role == "input" and _is_first(first, looks),
        "after": _last_finite(first, looks),
        "micro_batch": first.micro_batch,
        "value": "nan" if math.isnan(value) else "inf",
        "sites": outputs[:MAX_SITES],
        "num_bad": len(bad),
        "num_seen": len(looks),
        "is_sampled": first.is_sampled,
    }
    what = "NaN" if has_nan else "infinity"
    where = f"the {first.role} of {first.site}"
    message = f"{what} at step {step}, first in {where} (micro-batch {first.micro_batch})"
    return Event(type="nonfinite", message=message, step=step, time=now, severity="critical", details=details)


def _last_finite(look: Look, looks: list[Look]) -> str | None:
    """The module that last gave something finite before."""
    before = looks[: looks.index(look)]
    return next((o.site for o in reversed(before) if o.role == "output" and o.micro_batch == look.micro_batch), None)


def _is_first(look: Look, looks: list[Look]) -> bool:
    """Whether no module had run in this micro-batch when it was looked at: then the value came with the data."""
    before = looks[: looks.index(look)]
    return not any(other.micro_batch == look.micro_batch and other.role == "output" for other in before)
