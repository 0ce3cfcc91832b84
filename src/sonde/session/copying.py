"""Tensors copied to host memory while training goes on, and the proof that what was copied is what was there.

On a CPU a thread of its own copies while the model runs; on a GPU a stream of its own does. Nobody writes to a
parameter between two optimizer steps, as a rule; autograd counts writes (`_version`), so that whoever does is found out
and the tensor copied again, where nothing else can run. Only a write through `.data` is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.probe.guards import quiet
from sonde.record.snapshots import ChangedError
from sonde.schema.tensors import STORAGE, HostTensor
from sonde.session.staging import Arena, Place, dtype_name

_SMALL: Final = 1 << 15
"""Elements up to which torch copies without calling its other threads; these would be taken from the model."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NATIVE: Final = frozenset(name for name, stored in STORAGE.items() if name == stored)


class TooSlowError(Exception):
    """The copy was not there in time; training does not wait longer."""


class Copier:
    """A thread that copies, in order."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, args=(self._jobs, on_error), name="sonde-copies", daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)

    @staticmethod
    def _work(jobs: SimpleQueue[Callable[[], None] | None], on_error: Callable[[str, Exception], None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001  the next one must still be copied
                on_error("copying", error)
            del job  # it holds the tensors


class Copies:
    """Some tensors of one device on their way. Holds the tensors until they are copied, and no longer."""

    def __init__(self, names: list[str], tensors: list[Tensor], arena: Arena) -> None:
        self.names = names
        self._owners = tensors
        self._room = arena.room(tensors)
        self._sources: list[Tensor] = []
        self._marks: list[tuple[int, int] | None] = []
        self._places: list[Place] = []
        self.device = tensors[0].device
        self._event: Any = None
        self._error: Exception | None = None
        self._is_there = threading.Event()
        self._is_settled = False

    # ------------------------------------------------------------------------------------------- the training thread

    def hold(self, copier: Copier) -> None:
        """Copy while training goes on; from this moment on a write is found out, and costs the snapshot."""
        self._marks = [mark(tensor) for tensor in self._owners]
        copier.put(self._run)

    def start(self, copier: Copier, stream: Any = None) -> None:
        """Copy while training goes on."""
        if self.device.type == "cpu":
            copier.put(self._run)
        elif self.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._enqueue(range(len(self.names)))
        else:
            self.copy()

    def copy(self) -> None:
        """Copy now. A GPU does it in order with what it is doing; the host does not wait for it."""
        if self.device.type == "cuda":
            self._enqueue(range(len(self.names)))
            for source in self._sources:  # it may have been made on another stream, and be freed there
                source.record_stream(torch.cuda.current_stream(self.device))
        else:
            self._run()
            self._raise()
        self._let_go()

    def settle(self, wait_s: float) -> None:
        """From here on the tensors may change. What has changed since the start is copied again."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self._event)
        elif not self._is_there.wait(wait_s):
            raise TooSlowError(f"copying was not done within {wait_s:g} s of the optimizer step")
        self._raise()
        changed = self._changed()
        if changed:
            self._again(changed)
        self._let_go()

    def _let_go(self) -> None:
        """What a GPU has still to copy is safe: its memory is used again only behind the copy. To hold it until the
        snapshot is written would keep gradients and activations alive for seconds."""
        self._is_settled = True
        self._owners, self._sources = [], []

    def _prepare(self) -> None:
        """On the thread that copies, so that training has less to do. A tensor given other data keeps its old ones."""
        if self._places:
            return
        self._marks = self._marks or [mark(tensor) for tensor in self._owners]
        self._sources = [tensor.detach() for tensor in self._owners]
        self._places = self._room.places(self._sources)

    def _changed(self) -> list[int]:
        known = zip(self._owners, self._marks, strict=True)
        return [i for i, (tensor, then) in enumerate(known) if then is None or mark(tensor) != then]

    def _again(self, changed: list[int]) -> None:
        for i in changed:
            tensor, place = self._owners[i], self._places[i]
            if tensor.shape != place.shape or tensor.dtype != place.dtype or tensor.device != self.device:
                raise ChangedError(f"{self.names[i]} became another tensor in the middle of the step")
            self._sources[i] = tensor.detach()
        if self.device.type == "cuda":
            self._enqueue(changed)
        else:
            with quiet():
                copy_here([self._places[i] for i in changed], [self._sources[i] for i in changed])

    def _enqueue(self, which: Any) -> None:
        with quiet():
            self._prepare()
            torch._foreach_copy_(
                [self._places[i].tensor() for i in which], [self._sources[i] for i in which], non_blocking=True
            )
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self.device))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    # ---------------------------------------------------------------------------------------------------- elsewhere

    def _run(self) -> None:
        try:
            with quiet():
                self._prepare()
                copy_here(self._places, self._sources)
        except Exception as error:  # noqa: BLE001  raised again where somebody waits for the copy
            self._error = error
        self._is_there.set()

    def land(self) -> None:
        """Wait until the bytes are there, and let go of the tensors. Unless `settle` did, see that none has changed."""
        if self._event is not None:
            self._event.synchronize()
        else:
            self._is_there.wait()
        changed = [] if self._is_settled else self._changed()
        self._owners, self._sources = [], []
        self._raise()
        if changed:
            raise ChangedError(f"{self.names[changed[0]]} was written to while it was copied")

    def abandon(self) -> None:
        """On the copying thread, behind every copy it was given: nothing writes to this memory afterwards."""
        if self._event is not None:
            self._event.synchronize()
        self._owners, self._sources = [], []

    def tensors(self) -> dict[str, HostTensor]:
        return {
            name: HostTensor(place.bits(), dtype_name(place.dtype), tuple(place.shape))
            for name, place in zip(self.names, self._places, strict=True)
        }


def mark(tensor: Tensor) -> tuple[int, int] | None:
    """Where its bytes are and how often they were written to; None where nobody counts."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version


def copy_here(places: list[Place], sources: list[Tensor]) -> None:
    """On this thread and no other: the others are the model's."""
    small = [(p, s) for p, s in zip(places, sources, strict=True) if s.numel() < _SMALL or s.device.type != "cpu"]
    if small:
        torch._foreach_copy_([place.tensor() for place, _ in small], [source for _, source in small])
    for place, source in zip(places, sources, strict=True):
        if source.numel() >= _SMALL and source.device.type == "cpu":
            np.copyto(place.bits().reshape(place.shape), _bits(source))


def _bits(source: Tensor) -> Any:
    """What numpy can copy without knowing what it means."""
    source = source.resolve_conj().resolve_neg()
    if dtype_name(source.dtype) in _NATIVE:
        return source.numpy()
    bits: Any = source.view(_INTEGERS[source.element_size()]).numpy()
    return bits.view(STORAGE[dtype_name(source.dtype)])
