"""Background tasks, run one at a time on a thread that starts with the first task and ends when idle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

_CLOSE_S: Final = 2.0
_log: Final = logging.getLogger(__name__)
Task = TypeVar("Task")


class BackgroundTasks(Generic[Task]):
    """A queue of tasks, each identified by a key; a task that is added again before it has run is run once."""

    def __init__(self, name: str, work: Callable[[Task], None], *, head_start_s: float = 0.0) -> None:
        self._name, self._do, self._head_start_s = name, work, head_start_s
        self._tasks: SimpleQueue[tuple[Hashable, Task]] = SimpleQueue()
        self._pending: set[Hashable] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, key: Hashable, task: Task) -> None:
        with self._lock:
            if self._is_closed or key in self._pending:
                return
            self._pending.add(key)
            self._tasks.put((key, task))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def close(self) -> None:
        """Start no more tasks, and wait briefly for the current one."""
        self._is_closed = True
        self.wait(_CLOSE_S)

    def wait(self, timeout_s: float) -> None:
        """Wait until no task is pending, or until the timeout."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _work(self) -> None:
        time.sleep(self._head_start_s)
        while not self._is_closed:
            with self._lock:  # same lock as `add`: a new task finds either a thread that continues, or none
                try:
                    key, task = self._tasks.get_nowait()
                except Empty:
                    self._thread = None
                    return
            try:
                self._do(task)
            except Exception:  # noqa: BLE001
                _log.exception("%s: %s failed", self._name, key)  # continue with the other tasks
            with self._lock:
                self._pending.discard(key)
