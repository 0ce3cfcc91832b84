"""A snapshot in progress: from the first forward pass of a step until its optimizers have stepped.

It shows the model as its optimizer finds it: parameters and optimizer state before the update, the gradients that cause
it, buffers as the forward pass left them, and the activations of the step's first batch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sonde.probe.guards import quiet
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.session.snapshots.copies import Copier, Copies
from sonde.session.snapshots.gather import Gather, Named, unreadable
from sonde.session.snapshots.host_memory import NoRoomError
from sonde.session.snapshots.staging import Arena, Staging
from sonde.write.tensors.snapshots import Pending

if TYPE_CHECKING:
    from sonde.probe.optimizer.tap import OptimizerStep
    from sonde.write.items import AttemptNumber


class Streams:
    """A stream for copies on each GPU."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def of(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class Draft:
    """Used on the training thread, until `pending` hands it over."""

    def __init__(
        self,
        step: int,
        reason: str,
        staging: Staging,
        copier: Copier,
        streams: Streams,
        *,
        wait_s: float = 0.0,
        tickets: Sequence[str] = (),
        kinds: frozenset[str] = frozenset(),
        is_as_planned: bool = True,
        is_asked: bool = False,
    ) -> None:
        self.step, self.reason, self.time = step, reason, time.time()
        self.tickets, self.is_asked = tuple(tickets), is_asked
        self.kinds, self.is_as_planned = kinds, is_as_planned
        self._copier, self._streams = copier, streams
        self._arena, self._wait_s = Arena(staging, wait_s), wait_s
        self._all: list[Copies] = []
        self._begun: dict[int, list[Copies]] = {}
        """Copies in progress, by model, not settled yet."""
        self._settled: set[int] = set()
        self._names: set[str] = set()
        self._outputs: dict[str, Copies] = {}
        self._again: dict[str, Copies] = {}
        """Outputs that must be copied again."""

    def has_begun(self, model: int) -> bool:
        return model in self._begun or model in self._settled

    def is_settled(self, model: int) -> bool:
        return model in self._settled

    @property
    def is_empty(self) -> bool:
        return not self._all

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def waited_s(self) -> float:
        """How long training has waited for memory."""
        return self._wait_s - self._arena.wait_s

    @property
    def has_waited_in_vain(self) -> bool:
        return self._wait_s > 0 and not self._arena.wait_s

    # --------------------------------------------------------------------------------------------------- adding tensors

    def begin(self, model: int, gather: Gather, kinds: frozenset[str]) -> None:
        """Start copying tensors that nothing writes to until the optimizer steps. Without free memory they are copied
        at the step: an earlier snapshot may have been written by then."""
        try:
            self._begun[model] = self._copies(self._lasting(gather, kinds), may_wait=False)
        except NoRoomError:
            if not self._all:
                self._arena.release()
            return
        for copies in self._begun[model]:
            copies.start(self._copier, self._streams.of(copies.device))

    def take(self, gather: Gather, kinds: frozenset[str]) -> None:
        """The same, copied now."""
        self.add(self._lasting(gather, kinds))

    def _lasting(self, gather: Gather, kinds: frozenset[str]) -> list[Named]:
        named = [*gather.parameters(), *gather.buffers(large=True)] if "param" in kinds else []
        named += gather.states() if "optim" in kinds else []
        for name in [name for name, _ in named if name in self._names]:
            gather.on_unreadable(name, "a name that two watched models share. Give one of them a prefix=")
        return named

    def settle(self, model: int, gather: Gather, kinds: frozenset[str]) -> None:
        """Called when the optimizer is about to step."""
        self._settled.add(model)
        for copies in self._begun.pop(model, []):
            copies.settle()
        if "param" in kinds:
            self.add(gather.buffers(large=False))

    def add(self, named: list[Named]) -> None:
        """Copy before returning, or in order with the work of a GPU."""
        for copies in self._copies(named):
            copies.copy()

    def hold(self, named: list[Named]) -> None:
        """Start copying; if one is written to before it is copied, the whole snapshot is discarded.

        On a GPU nothing is held: its memory is what training runs out of first.
        """
        for copies in self._copies(named):
            if copies.device.type == "cpu":
                copies.hold(self._copier)
            else:
                copies.copy()

    def add_output(self, name: str, tensor: Tensor) -> None:
        """The first tensor of each name: repeated calls come later."""
        if name not in self._names and not unreadable(tensor):
            self.add([(name, tensor)])

    def add_outputs(self, named: list[Named]) -> None:
        """Add an output of a module, or an input of the model: the first of each name since the last `restart`."""
        for name, tensor in named:
            known = self._again.pop(name, None)
            if known is not None:
                self._all.remove(known)
                self._names.discard(name)
            if name not in self._names and not unreadable(tensor):
                (self._outputs[name],) = self._copies([(name, tensor)])
                self._outputs[name].copy()

    def restart(self) -> None:
        """Outputs so far may come from a pass that does not belong to the step: later ones replace them."""
        self._again = dict(self._outputs)

    def add_gradients(self, gather: Gather, step: OptimizerStep, *, at_once: bool) -> None:
        named = gather.gradients(step)
        if step.grad_scale is not None:
            self.add(_unscaled(named, step.grad_scale))
        elif at_once:
            self.add(named)
        else:
            self.hold(named)

    def _copies(self, named: list[Named], *, may_wait: bool = True) -> list[Copies]:
        by_device: dict[torch.device, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in named:
            if name not in self._names:
                by_device[tensor.device].setdefault(name, tensor)
        made = []
        for tensors in by_device.values():
            room = self._arena.room(list(tensors.values()), may_wait=may_wait)
            made.append(Copies(list(tensors), list(tensors.values()), room))
        self._names.update(name for copies in made for name in copies.names)
        self._all += made
        return made

    # ------------------------------------------------------------------------------------------------------- completion

    def pending(self, attempt: AttemptNumber) -> Pending:
        """Close the draft: nothing more is added."""
        return Pending(
            step=self.step,
            time=self.time,
            reason=self.reason,
            nbytes=self.nbytes,
            resolve=self._resolve,
            release=self._arena.release,
            tickets=self.tickets,
            attempt=attempt,
        )

    def _resolve(self) -> Snapshot:
        tensors: dict[str, HostTensor] = {}
        for copies in self._all:
            copies.land()
            tensors |= copies.tensors()
        return Snapshot(self.step, self.time, self.reason, dict(sorted(tensors.items())))

    def drop(self) -> None:
        """Return the memory after the copies that still write to it."""
        self._copier.put(_dropping(self._all, self._arena.release))
        self._all, self._begun = [], {}


def _unscaled(named: list[Named], scale: Tensor) -> list[Named]:
    """A fused optimizer under GradScaler divides by the scale in its own kernel: compute here what it will use."""
    with quiet():
        inverse = scale.double().reciprocal().float()  # as GradScaler does it
        return [(name, grad * inverse.to(grad.device, grad.dtype)) for name, grad in named]


def _dropping(copies: list[Copies], release: Callable[[], None]) -> Callable[[], None]:
    def drop() -> None:
        for one in copies:
            one.abandon()
        release()

    return drop
