"""The process that runs the rules during training, so that they take no time from the interpreter that trains.

It receives what the writer stores, through a pipe, and answers with findings, events and facts. It reads and writes no
file, never imports torch, and ends with the training process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Final

from sonde.schema.layout import RunStatus
from sonde.schema.records import Site
from sonde.schema.words import in_words
from sonde.session.observers.messages import receive, send
from sonde.session.observers.rules import Announcement, LiveRules
from sonde.write.items import Facts, NewAttempt
from sonde.write.observer import Item, Output
from sonde.write.thread_time import NICENESS

_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: the state of the run, and the process that trains."""

    parent: int
    sites: Mapping[int, Site]
    scalars: Mapping[int, str]
    content: dict[str, Any]
    """Of run.json."""
    work_s: float
    """CPU time of the training process when its session began."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items in the order in which they were stored."""

    items: list[Item]
    work_s: float
    """CPU time of the training process so far."""
    status: RunStatus | None = None
    """Set in the last message: how the run ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one check."""

    outputs: list[Output]
    to_say: list[Announcement]
    num_returns: int = 0
    """How often training had returned to an earlier step, as far as this check knows."""
    failure: str = ""
    is_last: bool = False


@dataclass(slots=True)
class RulesWorker:
    """Turns messages into answers."""

    source: BinaryIO
    target: int
    """File descriptor."""
    _messages: SimpleQueue[Batch | None] = field(default_factory=SimpleQueue)
    _to_say: list[Announcement] = field(default_factory=list)
    _work_s: float = 0.0
    _num_returns: int = 0

    def work(self) -> None:
        """Until the last message, or until the training process has ended."""
        start: Start = receive(self.source)
        self._work_s = start.work_s
        rules = LiveRules(self._to_say.append, work_clock=lambda: self._work_s, first_look_s=0.0)
        rules.begin(start.sites, start.scalars, start.content)
        threading.Thread(target=self._listen, daemon=True).start()
        while (batches := self._wait(start.parent)) is not None:
            for batch in batches:
                self._work_s = batch.work_s
                _add(rules, batch.items, start.content)
                self._num_returns += sum(isinstance(item, NewAttempt) for item in batch.items)
            status = batches[-1].status
            self._answer(rules.poll(time.monotonic()) if status is None else rules.finish(status), status is not None)
            if status is not None:
                return

    def _listen(self) -> None:
        """Empty the pipe while the rules run: the training process keeps no more than the pipe holds."""
        try:
            while True:
                self._messages.put(receive(self.source))
        except (EOFError, OSError):
            self._messages.put(None)

    def _wait(self, parent: int) -> list[Batch] | None:
        """All messages that have arrived, at least one; None when no more will come."""
        while True:
            try:
                batches = [self._messages.get(timeout=_POLL_S)]
                while not self._messages.empty():
                    batches.append(self._messages.get())
                found = [batch for batch in batches if batch is not None]
                return found or None
            except Empty:
                if os.getppid() != parent:  # a forked child of the dead parent may hold our input open
                    return None

    def _answer(self, outputs: Iterable[Output], is_last: bool) -> None:
        found = list(outputs)
        if found or self._to_say or is_last:
            send(self.target, Answer(found, list(self._to_say), self._num_returns, is_last=is_last))
        self._to_say.clear()


def _add(rules: LiveRules, items: Iterable[Item], content: dict[str, Any]) -> None:
    for item in items:
        if isinstance(item, Facts) and item.is_top:  # as the writer does with its own copy
            for key, value in item.facts.items():
                old = content.get(key)
                is_merged = isinstance(old, Mapping) and isinstance(value, Mapping)
                content[key] = {**old, **value} if is_merged else value  # type: ignore[dict-item]
        rules.on_item(item)


def command_line() -> list[str]:
    """The command that starts the process. The folder of the training script is not on its path: a `queue.py` there
    would be imported instead of Python's own."""
    begin = (
        f"import sys; sys.path.append({str(Path(__file__).parents[3])!r}); "
        "import sonde.session.observers.rules_worker as worker; worker.main()"
    )
    return [sys.executable, "-P", "-c", begin]


def main() -> None:
    # Whoever stops training stops it alone; this process ends when its input does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(max(NICENESS - os.nice(0), 0))
    target = os.dup(1)
    os.dup2(2, 1)  # nothing else may write between the messages
    code = 0
    try:
        RulesWorker(sys.stdin.buffer, target).work()
    except (BrokenPipeError, EOFError):
        pass
    except Exception as error:  # noqa: BLE001  reported in the run
        code = 1
        with contextlib.suppress(OSError):
            send(target, Answer([], [], failure=in_words(error)))
    # At once: Python would wait a second for the thread that reads the pipe, and training for this process.
    os._exit(code)
