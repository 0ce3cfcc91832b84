"""The queue from the training thread to the writer: bounded by bytes; when full, it refuses and never waits.

Built on `queue.SimpleQueue`, which may be entered again from a signal handler or a finalizer. There is no lock here.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any


class BoundedQueue:
    """Items with their sizes.

    >>> queue = BoundedQueue(max_bytes=10)
    >>> queue.offer("a", 8), queue.offer("b", 8)
    (True, False)
    """

    __slots__ = ("_flush_bytes", "_is_woken", "_items", "_put_bytes", "_taken_bytes", "_wakes", "max_bytes")

    def __init__(self, max_bytes: int, flush_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._flush_bytes = max_bytes if flush_bytes is None else flush_bytes
        self._items: SimpleQueue[tuple[Any, int]] = SimpleQueue()
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._is_woken = False
        # Two counters, one written by producers and one by the consumer: `+=` on a shared one would lose updates.
        self._put_bytes = 0
        self._taken_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    @property
    def num_items(self) -> int:
        return self._items.qsize()

    @property
    def is_empty(self) -> bool:
        return self._items.empty()

    def offer(self, item: Any, num_bytes: int) -> bool:
        """Queue an item, or refuse it if the queue would exceed its limit."""
        queued = self._put_bytes - self._taken_bytes + num_bytes
        if queued > self.max_bytes:
            return False
        self._put_bytes += num_bytes
        self._items.put((item, num_bytes))
        if queued >= self._flush_bytes and not self._is_woken:
            self.wake()
        return True

    def add(self, item: Any) -> None:
        """Queue an item that is small and must not be lost."""
        self._items.put((item, 0))

    def take(self, max_bytes: int) -> Iterator[Any]:
        """Items in order, until the queue is empty or `max_bytes` were taken."""
        taken = 0
        while taken < max_bytes:
            try:
                item, num_bytes = self._items.get_nowait()
            except Empty:
                # Two producers adding at once can lose one addition; here the exact value is known again.
                self._put_bytes = self._taken_bytes
                return
            self._taken_bytes += num_bytes
            taken += num_bytes
            yield item

    def wake(self) -> None:
        """End the consumer's wait."""
        self._is_woken = True
        self._wakes.put(None)

    def wait(self, timeout_s: float) -> None:
        """Sleep until woken. Putting an item does not wake: a thread woken per step would compete for the
        interpreter."""
        try:
            self._wakes.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return
        self._is_woken = False
        while not self._wakes.empty():
            self._wakes.get_nowait()
