"""Live events for open pages: a thread checks the runs once a second and notifies every listener. No data is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from starlette.concurrency import run_in_threadpool

from sonde.show.web.runs import Entry, RunTable
from sonde.show.web.wire import to_json

MAX_LISTENERS: Final = 64
LOOK_EVERY_S: Final = 1.0
COMMENT_EVERY_S: Final = 10.0
_QUEUE: Final = 256

Nudge = dict[str, Any]


class TooManyListenersError(Exception):
    """Every connection is in use."""


class News:
    """Checks the runs while at least one page listens."""

    def __init__(self, table: RunTable) -> None:
        self.table = table
        self._queues: set[asyncio.Queue[Nudge | None]] = set()
        self._seen: dict[str, tuple[Any, ...]] = {}
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def listen(self) -> AsyncIterator[bytes]:
        """Events in wire format, until the client or the server disconnects."""
        queue = self._open()
        try:
            yield b"retry: 2000\n\n: sonde\n\n"
            number = 0
            while not self._is_closed:
                try:
                    nudge = await asyncio.wait_for(queue.get(), COMMENT_EVERY_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if nudge is None:
                    return
                number += 1
                yield b"id: %d\ndata: %s\n\n" % (number, to_json(nudge))
        finally:
            self._queues.discard(queue)

    def _open(self) -> asyncio.Queue[Nudge | None]:
        queue: asyncio.Queue[Nudge | None] = asyncio.Queue(_QUEUE)
        self._queues.add(queue)
        self._loop = asyncio.get_running_loop()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        return queue

    def check_room(self) -> None:
        if len(self._queues) >= MAX_LISTENERS or self._is_closed:
            raise TooManyListenersError

    def notify(self, nudge: Nudge) -> None:
        """Notify all listeners, from the event loop. A slow one is notified that it missed events."""
        for queue in self._queues:
            try:
                queue.put_nowait(nudge)
            except asyncio.QueueFull:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait({"type": "runs"})

    def tell_from_thread(self, nudge: Nudge) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed() and self._queues:
            loop.call_soon_threadsafe(self.notify, nudge)

    def close(self) -> None:
        """Close every connection, so that the server can stop immediately."""
        self._is_closed = True
        for queue in self._queues:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        self._seen = await run_in_threadpool(self._look)
        while self._queues and not self._is_closed:
            await asyncio.sleep(LOOK_EVERY_S)
            now = await run_in_threadpool(self._look)
            for nudge in _differences(self._seen, now):
                self.notify(nudge)
            self._seen = now

    def _look(self) -> dict[str, tuple[Any, ...]]:
        """The state of each run. For a run that has ended, only the modification time of run.json is read."""
        return {id: _glance(entry) for id, entry in self.table.entries().items()}


def _glance(entry: Entry) -> tuple[Any, ...]:
    head = entry.head()
    findings: object = None
    if head.manifest is not None:
        findings = str(head.manifest.facts.get("diagnosis"))
    return head.step, head.status, head.reason, findings


def _differences(old: dict[str, tuple[Any, ...]], new: dict[str, tuple[Any, ...]]) -> list[Nudge]:
    nudges: list[Nudge] = []
    if old.keys() != new.keys():
        nudges.append({"type": "runs"})
    for id, now in new.items():
        before = old.get(id)
        if before is not None and before != now:
            step, status, reason, _ = now
            nudges.append({"type": "run", "run": id, "last_step": step, "status": status, "reason": reason[:500]})
            if before[3] != now[3]:
                nudges.append({"type": "findings", "run": id})
    return nudges
