"""Copies tensors to host memory while training continues, and proves that each copy is consistent.

On a CPU a separate thread copies while the model runs, part by part; parts that it has not started when the optimizer
steps are copied there and then, so a busy machine costs time but no snapshot. On a GPU a separate stream copies. As a
rule nothing writes to a parameter between two optimizer steps; autograd counts writes (`_version`), so an exception is
detected and the tensor copied again at a point where nothing else can run. Only a write through `.data` is not counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.probe.guards import quiet
from sonde.schema.snapshots.tensors import STORAGE, HostTensor
from sonde.session.snapshots.staging import Room, TensorSlot, dtype_name
from sonde.write.tensors.snapshots import ChangedError
from sonde.write.thread_time import note_thread_time

_SMALL: Final = 1 << 15
"""Elements up to which torch copies without its other threads, which the model needs."""
_PART_BYTES: Final = 16 << 20
_SMALL_AT_ONCE: Final = 512
_STUCK_S: Final = 60.0
"""A part takes milliseconds. After this long, the copying thread must have been suspended."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NATIVE: Final = frozenset(name for name, stored in STORAGE.items() if name == stored)


class TooSlowError(Exception):
    """The copying thread has stopped in the middle of a part; training does not wait longer."""


class Copier:
    """A thread that runs copies in order."""

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
            note_thread_time()


class Parts:
    """Parts of a copy, shared by several threads: each takes the next one, until none is left."""

    def __init__(self, parts: Iterable[Callable[[], None]], error: Exception | None = None) -> None:
        self._waiting = deque(parts)
        self._num_open, self._lock = len(self._waiting), threading.Lock()
        self._is_done = threading.Event()
        self._error = error
        if not self._waiting:
            self._is_done.set()

    def work(self) -> None:
        """Copy the parts that no other thread has started."""
        while self._waiting:
            try:
                part = self._waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                part()
            except Exception as error:  # noqa: BLE001  raised again by whoever waits for the copy
                self._error = error
            with self._lock:
                self._num_open -= 1
                if not self._num_open:
                    self._is_done.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all parts are copied. Raises the first error."""
        is_done = self._is_done.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return is_done


class Copies:
    """A copy in progress of tensors on one device. Holds the tensors until they are copied, and no longer."""

    def __init__(self, names: list[str], tensors: list[Tensor], room: Room) -> None:
        self.names = names
        self._owners = tensors
        self._room = room
        self._sources: list[Tensor] = []
        self._marks: list[tuple[int, int] | None] = []
        self._places: list[TensorSlot] = []
        self.device = tensors[0].device
        self._event: Any = None
        self._is_settled = False
        self._lock = threading.Lock()
        self._parts: Parts | None = None

    # -------------------------------------------------------------------------------------------------- training thread

    def hold(self, copier: Copier) -> None:
        """Copy while training continues; a write from now on is detected, and costs the snapshot."""
        self._marks = [mark(tensor) for tensor in self._owners]
        copier.put(self._run)

    def start(self, copier: Copier, stream: Any = None) -> None:
        """Copy while training continues."""
        if self.device.type == "cpu":
            copier.put(self._run)
        elif self.device.type == "cuda":
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                self._enqueue(range(len(self.names)))
        else:
            self.copy()

    def copy(self) -> None:
        """Copy now. A GPU does it in order with its other work; the host does not wait for it."""
        if self.device.type == "cuda":
            self._enqueue(range(len(self.names)))
            for source in self._sources:  # it may come from another stream, and be freed there
                source.record_stream(torch.cuda.current_stream(self.device))
        else:
            self._run()
            self._prepared().wait()
        self._let_go()

    def settle(self) -> None:
        """Called before the tensors may change. Tensors that have changed since the start are copied again."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_event(self._event)
        else:
            self._run()
            if not self._prepared().wait(_STUCK_S):
                raise TooSlowError(f"the copying thread has been stuck for {_STUCK_S:g} s")
        changed = self._changed()
        if changed:
            self._again(changed)
        self._let_go()

    def _let_go(self) -> None:
        """Memory that a GPU has yet to copy is safe: it is reused only after the copy. Holding it until the snapshot is
        written would keep gradients and activations alive for seconds."""
        self._is_settled = True
        self._owners, self._sources = [], []

    def _prepare(self) -> None:
        """Runs mostly on the copying thread, to keep training short. A tensor whose data was replaced keeps the old
        data."""
        if self._places:
            return
        self._marks = self._marks or [mark(tensor) for tensor in self._owners]
        self._sources = [tensor.detach() for tensor in self._owners]
        self._places = self._room.places(self._sources)

    def _prepared(self) -> Parts:
        """Run by whichever thread comes first; errors are raised by whoever waits for the copy."""
        with self._lock:
            if self._parts is None:
                try:
                    self._prepare()
                    self._parts = Parts(parts_of(self._places, self._sources))
                except Exception as error:  # noqa: BLE001
                    self._parts = Parts([], error)
            return self._parts

    def _changed(self) -> list[int]:
        known = zip(self._owners, self._marks, strict=True)
        return [i for i, (tensor, then) in enumerate(known) if then is None or mark(tensor) != then]

    def _again(self, changed: list[int]) -> None:
        for i in changed:
            tensor, place = self._owners[i], self._places[i]
            if tensor.shape != place.shape or tensor.dtype != place.dtype or tensor.device != self.device:
                raise ChangedError(f"{self.names[i]} was replaced by another tensor during the step")
            self._sources[i] = tensor.detach()
        if self.device.type == "cuda":
            self._enqueue(changed)
        else:
            with quiet():
                again = Parts(parts_of([self._places[i] for i in changed], [self._sources[i] for i in changed]))
                again.work()
                again.wait()

    def _enqueue(self, which: Any) -> None:
        with quiet():
            self._prepare()
            torch._foreach_copy_(
                [self._places[i].tensor() for i in which], [self._sources[i] for i in which], non_blocking=True
            )
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self.device))

    # ---------------------------------------------------------------------------------------------------- other threads

    def _run(self) -> None:
        """Called on the copying thread, and when the optimizer steps."""
        with quiet():
            self._prepared().work()

    def land(self) -> None:
        """Wait for the bytes and release the tensors. Unless `settle` did so, check that none has changed."""
        if self._event is not None:
            self._event.synchronize()
        else:
            with quiet():
                self._prepared().wait()
        changed = [] if self._is_settled else self._changed()
        self._owners, self._sources = [], []
        if changed:
            raise ChangedError(f"{self.names[changed[0]]} was modified while it was being copied")

    def abandon(self) -> None:
        """Called on the copying thread after all its copies: nothing writes to this memory afterwards."""
        if self._event is not None:
            self._event.synchronize()
        self._owners, self._sources = [], []

    def tensors(self) -> dict[str, HostTensor]:
        return {
            name: HostTensor(place.bits(), dtype_name(place.dtype), tuple(place.shape))
            for name, place in zip(self.names, self._places, strict=True)
        }


def mark(tensor: Tensor) -> tuple[int, int] | None:
    """The address of its bytes and the number of writes to them; None if writes are not counted."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor._version


def parts_of(places: list[TensorSlot], sources: list[Tensor]) -> Iterator[Callable[[], None]]:
    """The copy as parts of a few megabytes. Each is done by a single thread: the others belong to the model."""
    pairs = list(zip(places, sources, strict=True))
    small = [(p, s) for p, s in pairs if s.numel() < _SMALL or s.device.type != "cpu"]
    for start in range(0, len(small), _SMALL_AT_ONCE):
        yield partial(_copy_small, small[start : start + _SMALL_AT_ONCE])
    for place, source in pairs:
        if source.numel() >= _SMALL and source.device.type == "cpu":
            target, bits = place.bits().reshape(place.shape), bits_of(source)
            rows = max(len(target) * _PART_BYTES // target.nbytes, 1)
            for start in range(0, len(target), rows):
                yield partial(np.copyto, target[start : start + rows], bits[start : start + rows])


def _copy_small(pairs: list[tuple[TensorSlot, Tensor]]) -> None:
    torch._foreach_copy_([place.tensor() for place, _ in pairs], [source for _, source in pairs])


def bits_of(source: Tensor) -> Any:
    """A view that numpy can copy without knowing its dtype."""
    source = source.resolve_conj().resolve_neg()
    if dtype_name(source.dtype) in _NATIVE:
        return source.numpy()
    bits: Any = source.view(_INTEGERS[source.element_size()]).numpy()
    return bits.view(STORAGE[dtype_name(source.dtype)])
