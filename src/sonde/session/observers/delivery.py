"""Delivery to another tracker on a separate thread. Nothing waits for it, and it reports undelivered values."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

from sonde.schema.layout import RunStatus
from sonde.write.items import FindingRow
from sonde.write.thread_time import note_thread_time

MAX_WAITING: Final = 1 << 17
"""Values that may wait for a tracker that is slow or has not started yet; a few tens of megabytes."""
MAX_FAILURES: Final = 5
"""Consecutive failed calls before sonde gives up on the tracker."""


@runtime_checkable
class Sink(Protocol):
    """Another tracker. Called on its own thread, which it may block.

    A tracker that can discard steps also has a method `rewound(step)`: training returned to this step.
    """

    def begin(self, run: Mapping[str, Any]) -> None:
        """`run` is the content of run.json: name, project, config, tags."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    def finding(self, found: FindingRow) -> None: ...

    def close(self, status: RunStatus) -> None: ...


class Unopened:
    """A sink that could not be opened, and raises the error when it starts."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def begin(self, run: Mapping[str, Any]) -> None:
        raise self._error

    def numbers(self, step: int, values: Mapping[str, float]) -> None: ...

    def finding(self, found: FindingRow) -> None: ...

    def close(self, status: RunStatus) -> None: ...


class Delivery:
    """Passes everything to one sink, in order. Used by the writer thread only."""

    def __init__(self, sink: Sink, run: Mapping[str, Any]) -> None:
        self._sink = sink
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self.num_given = self.num_delivered = 0
        self._num_refused = self._num_lost = 0
        self.problem = ""
        """The first failure of the tracker."""
        self.has_begun = self.has_stopped = False
        # A separate context: some trackers keep the user's run in the one they are called in.
        main = contextvars.Context().run
        self._thread = threading.Thread(target=main, args=(self._work, run), name="sonde-mirror", daemon=True)
        self._thread.start()

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Send these values, unless too many are already waiting."""
        num_waiting = self.num_given - self._num_refused - self._num_lost - self.num_delivered
        self.num_given += len(values)
        if self.has_stopped or num_waiting + len(values) > MAX_WAITING:
            self._num_refused += len(values)
        elif values:
            self._waiting.put((lambda: self._sink.numbers(step, values), len(values)))

    def finding(self, found: FindingRow) -> None:
        self._waiting.put((lambda: self._sink.finding(found), 0))

    def rewound(self, step: int) -> None:
        """Training returned to this step: have the tracker discard later ones, if it can."""
        forget: Callable[[int], None] | None = getattr(self._sink, "rewound", None)
        if forget is not None:
            self._waiting.put((lambda: forget(step), 0))

    def close(self, status: RunStatus) -> None:
        """Send everything that is waiting, then the final status of the run. Does not wait for it."""
        self._waiting.put((lambda: self._sink.close(status), 0))
        self._waiting.put(None)

    def wait(self, end: float) -> str:
        """Wait until everything is delivered or the monotonic clock reaches `end`. Returns why something is missing, or
        ""."""
        began = time.monotonic()
        self._thread.join(max(end - began, 0.0))
        if self._thread.is_alive():
            return f"still sending {time.monotonic() - began:.0f} s after the end of the run"
        return self.problem or ("the tracker was too slow for the rest" if self._num_refused else "")

    def _work(self, run: Mapping[str, Any]) -> None:
        try:
            self._sink.begin(run)
            self.has_begun = True
            self._send_all()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - their tracker failed; the run is complete without it
            self._note(error)
            self.has_stopped = True
            while not self._waiting.empty():
                self._waiting.get()

    def _send_all(self) -> None:
        num_in_a_row = 0
        while (item := self._waiting.get()) is not None:
            work, num_values = item
            try:
                work()
            except Exception as error:
                self._note(error)
                self._num_lost += num_values
                num_in_a_row += 1
                if num_in_a_row == MAX_FAILURES:
                    raise
            else:
                self.num_delivered += num_values
                num_in_a_row = 0
            note_thread_time()

    def _note(self, error: BaseException) -> None:
        self.problem = self.problem or f"{type(error).__name__}: {error}"
