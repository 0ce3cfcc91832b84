"""Runs the rules during training in a separate process, and brings back what they find.

Until the first check is due, records are only kept; a run that is over by then is checked here. The process is started
once. If it cannot be started, the rules run in this one. If it ends before the run does, the run goes unchecked until
`sonde diagnose`, and an event says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from sonde.schema.layout import RunStatus
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord, to_json
from sonde.session.observers import rules as live
from sonde.session.observers.messages import Inbox, send
from sonde.session.observers.rules import Announcement, LiveRules
from sonde.session.observers.rules_worker import Answer, Batch, Start, command_line
from sonde.write.items import Document, Facts, NewAttempt
from sonde.write.observer import Item, Output
from sonde.write.thread_time import note_thread_time

if TYPE_CHECKING:
    from sonde.diagnose.finding import Finding

_ITEM_BYTES: Final = 640
"""Memory of an item in addition to its arrays."""
_LAST_CHECK_S: Final = 15.0
"""Longest wait for the last check if the run has no deadline."""
_SHARE: Final = 0.5
"""Fraction of the time before the deadline that the last check may take: the records come first."""
_EXIT_S: Final = 1.0


class RulesProcess:
    """An `Observer` that passes everything to a process in which `LiveRules` checks it.

    `end` returns when the run must be over, by the monotonic clock, if that is known. `others` returns new events of
    the job's other ranks, which the writer does not see.
    """

    def __init__(
        self,
        say: Callable[[Announcement], None],
        end: Callable[[], float | None],
        others: Callable[[], Iterable[Event]] = tuple,
    ) -> None:
        self._say, self._end, self._others = say, end, others
        self._items: list[Item] = []
        self._facts: dict[str, Any] = {}
        """The latest facts; not a list of items, which would grow with each `watch`."""
        self._returns: list[int] = []
        """Steps that training returned to."""
        self._num_bytes = 0
        self._step = -1
        self._sites: Mapping[int, Site] = {}
        self._scalars: Mapping[int, str] = {}
        self._content: Mapping[str, Any] = {}
        self._work_s = time.process_time()
        self._start_at = time.monotonic() + live.FIRST_LOOK_S
        self._is_urgent = self._is_over = False
        self._here: LiveRules | None = None
        """Checks in this process, where no other one can be started."""
        self._link: Link | None = None

    # ---------------------------------------------------------------------------------------------------------- records

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        self._sites, self._scalars, self._content = dict(sites), dict(scalars), content

    def on_item(self, item: Item) -> None:
        if self._is_over:
            return
        if self._here is not None:
            self._here.on_item(item)
            return
        if isinstance(item, StatsRecord):
            self._step = item.step
            num_bytes = item.rows.nbytes + item.hist.nbytes
            if self._link is not None and self._waiting_bytes + num_bytes > live.MAX_WAITING_BYTES:
                return  # the process is slower than training: the rules see fewer steps, and everything else
            self._num_bytes += num_bytes
        elif isinstance(item, ScalarsRecord):
            self._num_bytes += 4 * item.values.nbytes
        elif isinstance(item, Event):
            self._is_urgent |= item.type == "nonfinite"
        elif isinstance(item, NewAttempt):
            self._returns.append(item.step)
        elif isinstance(item, Facts) and not item.is_top:
            self._facts.update(item.facts)
            return
        self._num_bytes += _ITEM_BYTES
        self._items.append(item)

    @property
    def _waiting_bytes(self) -> int:
        return self._num_bytes + (0 if self._link is None else self._link.waiting_bytes)

    # ----------------------------------------------------------------------------------------------------------- checks

    def poll(self, now: float) -> Iterator[Output]:
        if self._is_over:
            return
        for event in self._others():
            self.on_item(event)
        if self._link is None and self._here is None:
            if not self._is_due(now):
                return
            self._start()
        if self._here is not None:
            yield from self._here.poll(now)
        elif self._link is not None:
            if self._items:
                num_bytes = self._num_bytes
                self._link.put(self._batch(), num_bytes)
            yield from self._answers(self._link, wait_until=0.0)

    def finish(self, status: RunStatus) -> Iterator[Output]:
        """The last check. It gets part of the time that is left."""
        if self._is_over:
            return
        for event in self._others():
            self.on_item(event)
        if self._link is None:
            yield from (self._here or self._make_here()).finish(status)
            return
        now, end = time.monotonic(), self._end()
        num_bytes = self._num_bytes
        self._link.put(self._batch(status), num_bytes)
        wait_s = _LAST_CHECK_S if end is None else _SHARE * (end - now)
        yield from self._answers(self._link, wait_until=now + wait_s)
        if not self._is_over:
            yield self._event("the last check took too long and was stopped; run `sonde diagnose`")
        self._link.close()

    def _is_due(self, now: float) -> bool:
        if not self._items:
            return False
        return now >= self._start_at or self._is_urgent or self._num_bytes > live.MAX_WAITING_BYTES

    def _batch(self, status: RunStatus | None = None) -> Batch:
        return Batch([_plain(item) for item in self._take()], time.process_time(), status)

    def _take(self) -> list[Item]:
        facts, self._facts = self._facts, {}
        items, self._items, self._num_bytes = self._items, [], 0
        return [Facts(facts), *items] if facts else items

    def _answers(self, link: Link, *, wait_until: float) -> Iterator[Output]:
        """Everything the process has answered; until the clock reaches `wait_until`, wait for its last answer."""
        while True:
            answers = link.receive(max(wait_until - time.monotonic(), 0.0))
            for answer in map(self._still_true, answers or ()):
                for said in answer.to_say:
                    self._say(said)
                yield from answer.outputs
                if answer.failure:
                    yield self._failed(answer.failure)
                self._is_over |= answer.is_last
            if self._is_over:
                return
            if answers is None:
                yield self._failed(f"their process ended with exit code {link.exit_code()}")
            elif time.monotonic() < wait_until:
                continue
            return

    def _still_true(self, answer: Answer) -> Answer:
        """The answer without what it says of steps that were abandoned meanwhile. The process forgets them too, as soon
        as it knows."""
        step = min(self._returns[answer.num_returns :], default=None)
        if step is None:
            return answer
        outputs = [output for output in answer.outputs if _is_before(output, step)]
        return replace(
            answer, outputs=outputs, to_say=[said for said in answer.to_say if _is_before(said.finding, step)]
        )

    # -------------------------------------------------------------------------------------------------------- internals

    def _start(self) -> None:
        """Start the process and pass it the state of the run."""
        try:
            link = Link()
        except (OSError, ValueError):  # a sandbox without processes, or no interpreter to start
            self._make_here()
            return
        content = json.loads(to_json(dict(self._content)))
        link.put(Start(os.getpid(), self._sites, self._scalars, content, self._work_s), 0)
        self._link = link

    def _make_here(self) -> LiveRules:
        """Check in this process, starting with everything that was kept."""
        self._here = LiveRules(self._say, first_look_s=0.0)
        self._here.begin(self._sites, self._scalars, self._content)
        for item in self._take():
            self._here.on_item(item)
        return self._here

    def _failed(self, why: str) -> Event:
        self._is_over = True
        if self._link is not None:
            self._link.close()
        return self._event(f"live findings are switched off: {why}")

    def _event(self, message: str) -> Event:
        return Event(type="observer_failed", message=message, severity="warning", step=self._step, time=time.time())


class Link:
    """The process and the two pipes to it. Only a separate thread waits for the process to take a message."""

    def __init__(self) -> None:
        if not (sys.executable and hasattr(os, "writev")):
            raise ValueError("no Python interpreter to start")
        single = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        self._process = subprocess.Popen(
            command_line(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **single},
            start_new_session=True,  # Ctrl-C is for training
        )
        self._inbox = Inbox()
        self._messages: SimpleQueue[tuple[Any, int] | None] = SimpleQueue()
        # Two counters, each with one writer: `+=` on a shared one would lose updates.
        self._put_bytes = self._sent_bytes = 0
        self._thread = threading.Thread(target=self._send_all, name="sonde-rules", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._sent_bytes

    def put(self, message: Any, num_bytes: int) -> None:
        self._put_bytes += num_bytes
        self._messages.put((message, num_bytes))

    def receive(self, timeout_s: float) -> list[Answer] | None:
        """Answers that have arrived. If there are none, wait for one; None if the process has ended."""
        assert self._process.stdout is not None
        fd, found = self._process.stdout.fileno(), list[Answer]()
        while select.select([fd], [], [], 0.0 if found else timeout_s)[0]:
            data = os.read(fd, 1 << 16)
            if not data:
                return found or None
            found += self._inbox.add(data)
        return found

    def exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_EXIT_S)
        return None

    def close(self) -> None:
        """End the process. It keeps nothing that could be lost."""
        self._messages.put(None)
        if self.exit_code() is None:
            self._process.kill()
            self._process.wait()
        self._thread.join(_EXIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send_all(self) -> None:
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        with contextlib.suppress(OSError):  # the process has ended: whoever receives its answers sees that
            while (item := self._messages.get()) is not None:
                message, num_bytes = item
                send(fd, message)
                self._sent_bytes += num_bytes
                note_thread_time()


def _is_before(output: Output | Finding, step: int) -> bool:
    """Whether it is about earlier steps only; a summary is about all of them."""
    if isinstance(output, Facts):
        return False
    if isinstance(output, Event):
        return output.step < step or output.type == "rule_failed"
    return max(output.step, output.last_step) < step


def _plain(item: Item) -> Item:
    """The item without objects of the user, which the process could not read."""
    if isinstance(item, Facts):
        return replace(item, facts=json.loads(to_json(item.facts)))
    if isinstance(item, Document):
        return replace(item, content=json.loads(to_json(item.content)))
    if isinstance(item, Event):
        return replace(item, details=json.loads(to_json(item.details)))
    return item
