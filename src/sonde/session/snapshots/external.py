"""Snapshots of a model that another framework trains. Its adapter reads the tensors; this decides which steps are kept,
counts the memory, and hands them to the store. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sonde.errors import UsageError
from sonde.probe.select import chooser
from sonde.schema.snapshots.tensors import (
    SNAPSHOT_KINDS,
    STORAGE,
    AnyArray,
    HostTensor,
    Snapshot,
    kind_of,
    storage_dtype,
)
from sonde.session.snapshot_plan import ON_DEMAND, Snapshots, as_plan
from sonde.session.snapshots.host_memory import HostMemory, NoRoomError
from sonde.session.snapshots.requests import SCHEDULED, Ask
from sonde.session.snapshots.taker import SnapshotTaker
from sonde.write.tensors.snapshots import Pending

ToHost = Callable[[Any], AnyArray]
"""Copies a tensor of the framework to host memory, as an array with elements of the same width. Called on the thread
that writes snapshots; may wait for a device."""


class _Tensor(NamedTuple):
    value: Any
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * storage_dtype(self.dtype).itemsize


class ExternalDraft:
    """A snapshot in progress. Tensors that are added must not change any more."""

    def __init__(self, step: int, asks: Sequence[Ask], kinds: frozenset[str]) -> None:
        self.step, self.kinds, self.time = step, kinds, time.time()
        self.reason = ", ".join(dict.fromkeys(ask.reason for ask in asks))
        self.tickets = tuple(ticket for ask in asks for ticket in ask.tickets)
        self.tensors: dict[str, _Tensor] = {}


class ExternalSnapshots:
    """The snapshots of one model in a session: `begin` a step, `add` its tensors, `hand_over`."""

    def __init__(self, taker: SnapshotTaker, snapshots: Any, *, kinds: Collection[str], to_host: ToHost) -> None:
        """Raises if the plan asks for kinds that this framework cannot give. `kinds` are those that it can."""
        self.plan = check_plan(snapshots, kinds)
        self._recording, self._taker = taker.recording, taker
        self._kinds, self._to_host = frozenset(kinds), to_host
        self._choose = chooser(self.plan.sites)
        self._known: dict[str, bool] = {}
        self._memory: HostMemory | None = None
        self._gave_up_at = -2
        self._taker.follow_external(self.plan)

    def begin(self, step: int, num_steps: int = 1) -> ExternalDraft | None:
        """The snapshot that this step starts, or None. With several steps in one call of the framework, the first of
        them is kept if any of them is due."""
        if self._recording.breaker.is_open:
            return None
        asks = self._taker.asks.take()
        if any(map(self.plan.is_due, range(step, step + num_steps))):
            asks.append(Ask(SCHEDULED))
        kinds = frozenset(kind for ask in asks for kind in ask.kinds or self.plan.kind_names) & self._kinds
        return ExternalDraft(step, asks, kinds) if asks else None

    def wants(self, name: str, owner: Any = None) -> bool:
        """Whether the site of a tensor is selected. `owner`: its layer, for functions and types as `sites=`."""
        known = self._known.get(name)
        if known is None:
            site = name.partition("/")[2]
            known = self._known[name] = self._choose(site, site, owner)
        return known

    def add(self, draft: ExternalDraft, name: str, value: Any, dtype: str) -> None:
        """Add a tensor, `value.shape` of `dtype`; the first of each name counts."""
        if name in draft.tensors:
            return
        if dtype not in STORAGE:
            self._recording.warn_once(
                f"snapshot without {dtype}", f"{name} is left out of snapshots: it is of type {dtype}."
            )
            return
        draft.tensors[name] = _Tensor(value, dtype, tuple(int(size) for size in value.shape))

    def hand_over(self, draft: ExternalDraft) -> None:
        """Everything is added: write it while training continues. Training waits only for memory."""
        self._warn_of_missing(draft)
        if not draft.tensors:
            self.drop(draft, f"there was nothing to copy for {', '.join(sorted(draft.kinds)) or 'these kinds'}")
            return
        nbytes = sum(tensor.nbytes for tensor in draft.tensors.values())
        self._memory = self._memory or HostMemory.of(self._recording.settings.snapshot_mib)
        is_stuck = self._taker.num_done == self._gave_up_at
        try:
            self._memory.reserve(nbytes, wait_s=0.0 if is_stuck else self._recording.settings.snapshot_wait_s)
        except NoRoomError as error:
            self._gave_up_at = self._taker.num_done
            self.drop(draft, str(error))
            return
        self._taker.keep(
            Pending(
                step=draft.step,
                time=draft.time,
                reason=draft.reason,
                nbytes=nbytes,
                resolve=partial(_resolve, draft, self._to_host),
                release=partial(self._memory.release, nbytes),
                attempt=self._recording.writer.attempt(),
                tickets=draft.tickets,
            )
        )

    def drop(self, draft: ExternalDraft, why: str) -> None:
        """There will be no snapshot of this step."""
        self._taker.ledger.skip(draft.step, why, draft.tickets)

    def _warn_of_missing(self, draft: ExternalDraft) -> None:
        if self.plan is ON_DEMAND:
            return
        missing = draft.kinds - {kind_of(name) for name in draft.tensors}
        for kind in sorted(missing):
            self._recording.warn_once(
                f"snapshot misses {kind}", f'the snapshot of step {draft.step} has no tensors of kind "{kind}".'
            )


def check_plan(snapshots: Any, kinds: Collection[str]) -> Snapshots:
    """The plan in `snapshots=`, or an error if the framework cannot give its kinds. "all" means all that it can."""
    plan = as_plan(snapshots)
    asked = set(plan.kind_names)
    if plan.probe is not None:
        raise UsageError("a probe batch needs a torch model; leave out Snapshots(probe=...).")
    is_all = asked | {"probe"} == {*SNAPSHOT_KINDS}
    wrong = set() if is_all else asked - set(kinds)
    if wrong:
        raise UsageError(f"snapshots here hold {', '.join(sorted(kinds))}; not {', '.join(sorted(wrong))}.")
    return plan


def _resolve(draft: ExternalDraft, to_host: ToHost) -> Snapshot:
    found = {}
    for name in sorted(draft.tensors):
        tensor = draft.tensors[name]
        flat = np.ascontiguousarray(to_host(tensor.value)).reshape(-1)
        found[name] = HostTensor(flat.view(storage_dtype(tensor.dtype)), tensor.dtype, tensor.shape)
    draft.tensors.clear()
    return Snapshot(draft.step, draft.time, draft.reason, found)
