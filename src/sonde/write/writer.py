"""The writer as the session sees it: ids, `put`, `event`, `flush`, `close`. Nothing here waits for a disk or raises.

A `Recorder` does the work on a separate daemon thread; the two share a queue and a few numbers.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from sonde.display import warn
from sonde.errors import CorruptError, RunError
from sonde.schema.layout import RunStatus, Stream
from sonde.schema.records import Event, ScalarsRecord, Shard, Site
from sonde.schema.words import MIB
from sonde.write.ending import announce_ending
from sonde.write.environment import git_state, package_versions, working_directory
from sonde.write.folder import absolute
from sonde.write.items import (
    AttemptNumber,
    Barrier,
    Document,
    Facts,
    KeptRow,
    LateRecord,
    NewAttempt,
    NewScalar,
    NewShard,
    NewSite,
    Record,
    StepBegan,
)
from sonde.write.lock import RunLock
from sonde.write.observer import Observer
from sonde.write.options import WriterOptions
from sonde.write.queue import BoundedQueue
from sonde.write.recorder import MAX_EVENTS, Recorder, Shared, Shutdown
from sonde.write.storable import storable_name, storable_site
from sonde.write.thread_time import note_thread_time, threads_cpu_s

__all__ = ["Writer", "WriterOptions"]

_ENVIRONMENT_PATIENCE_S: Final = 1.0
_ANNOUNCING_PATIENCE_S: Final = 0.2
_POLL_S: Final = 0.05
_CLOSING_PATIENCE_S: Final = 60.0
_closing: dict[Path, threading.Thread] = {}
"""Writers of this process that still seal a run which has ended."""
_STEP_BYTES: Final = 64
_abandoned: list[Any] = []
"""Objects that must stay alive in a forked child: a destructor would touch the parent's files."""


def _warn(message: str) -> None:
    warn(f"sonde: {message}", RuntimeWarning, stacklevel=2)


class Writer:
    """Writes one run. Arrays passed to `put` must not be changed afterwards.

    writer = Writer(create_run(Path("runs"), project="gpt"), WriterOptions())
    site = writer.site_id(Site(kind="grad", name="0.weight"))
    writer.put(StatsRecord.without_hist(0, time.time(), np.array([site], np.int32), rows), rows.nbytes, step=0)
    writer.close("finished")
    """

    def __init__(
        self,
        run: Path,
        options: WriterOptions,
        *,
        resume: bool = False,
        is_same_attempt: bool = False,
        on_warning: Callable[[str], None] = _warn,
        observer: Observer | None = None,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        self.run, self.options = absolute(run), options
        self._on_beat = on_beat
        wait_for_closing(self.run)
        self._lock = RunLock(self.run)
        self._queue = BoundedQueue(int(options.queue_mib * MIB), int(options.flush_mib * MIB))
        self._shared = Shared()
        self._is_closed = False
        self._num_events = 0
        self._attempt: AttemptNumber | None = None
        self._site_ids: dict[Site, int] = {}
        self._ids_by_name: dict[tuple[str, str], int] = {}
        self._shards: dict[int, Shard] = {}
        self._scalar_ids: dict[str, int] = {}
        self._ids_by_scalar: dict[str, int] = {}
        self._pid = os.getpid()
        self._recorder: Recorder | None = None
        answer: SimpleQueue[Recorder | BaseException] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._main,
            args=(answer, resume, is_same_attempt, on_warning, observer),
            name="sonde-writer",
            daemon=True,
        )
        try:
            self._thread.start()
            self._begin(answer.get())
        except BaseException:
            self._lock.release()
            raise
        self._environment = threading.Thread(
            target=_describe, args=(self._queue, working_directory()), name="sonde-environment", daemon=True
        )
        self._environment.start()

    # -------------------------------------------------------------------------------------------------- training thread

    def site_id(self, site: Site) -> int:
        """The id of a site; the same in every session of a run."""
        id = self._site_ids.get(site)
        return self._learn_site(site) if id is None else id

    def note_shard(self, id: int, shard: Shard) -> None:
        """This process records only a part of a site."""
        if self._shards.get(id) != shard and not self._is_closed:
            self._shards[id] = shard
            self._queue.add(NewShard(id, shard))

    def scalar_id(self, name: str) -> int:
        id = self._scalar_ids.get(name)
        return self._learn_scalar(name) if id is None else id

    def put(self, item: Record | LateRecord, num_bytes: int, *, step: int, stream: Stream = "stats") -> bool:
        """Queue a record, or a function that creates one on the writer thread. False: it was dropped, and counted.

        `stream` says where a dropped function is counted; a record knows its own.
        """
        if self._is_closed:
            return False
        if self._queue.offer(item, num_bytes):
            return True
        shared = self._shared
        if isinstance(item, ScalarsRecord):
            stream = "scalars"
        shared.dropped[stream] += 1
        if shared.first_dropped_step < 0:
            shared.first_dropped_step = step
        shared.last_dropped_step = step
        return False

    def event(self, event: Event) -> None:
        """Record an event. After ten thousand they are only counted."""
        self._num_events += 1
        if not self._is_closed and self._num_events <= MAX_EVENTS:
            self._queue.add(event)

    def kept(self, row: KeptRow) -> None:
        """Whole tensors became visible on disk: record it in the catalog."""
        if not self._is_closed:
            self._queue.add(row)

    def begin_attempt(self, step: int, *, after: int) -> None:
        """Training returns to this step: records put from now on belong to a new attempt. `after` is the step that
        would have come next."""
        self._attempt = None
        if not self._is_closed:
            self._queue.add(NewAttempt(step=step, after=after, time=time.time()))
        self._shared.step = step

    def attempt(self) -> AttemptNumber:
        """The number of the current attempt, for tensors that belong to it. Never waits."""
        if self._attempt is None:
            self._attempt = AttemptNumber()
            if not self._is_closed:
                self._queue.add(self._attempt)
                self._queue.wake()
        return self._attempt

    def set_step(self, step: int, *, is_first: bool = False, visible: int = -1) -> None:
        """Everything of the steps before this one was put. `is_first`: no step has ended yet. `visible`: with several
        training threads, the step of the furthest."""
        self._shared.step = max(step, visible)
        if not self._is_closed:
            # If the queue is full, the next mark replaces this one.
            self._queue.offer(StepBegan(step, is_first, visible), _STEP_BYTES)

    def note(self, **facts: Any) -> None:
        """Facts for run.json, written at the next heartbeat."""
        if not self._is_closed:
            self._queue.add(Facts(facts))

    def document(self, name: str, content: dict[str, Any]) -> None:
        """A separate file in the run folder: replaced atomically, signed like run.json. The name is one of ours."""
        if not self._is_closed:
            self._queue.add(Document(name, content))

    @property
    def is_empty(self) -> bool:
        """Whether the run has neither a site nor a scalar yet."""
        return not self._site_ids and not self._scalar_ids

    @property
    def dropped(self) -> dict[str, int]:
        """Records that will not be on disk, by stream."""
        return dict(self._shared.num_dropped())

    @property
    def degraded(self) -> str:
        """Why nothing can be written at the moment; empty if all is well."""
        return self._shared.degraded

    @property
    def is_done(self) -> bool:
        """Whether everything that was put, and the final status, is on disk, or cannot be."""
        return self._shared.said.is_set() or not self._thread.is_alive()

    @property
    def cpu_s(self) -> float:
        """CPU seconds that sonde's threads in this process have used, the writer and all others. Cheap to read."""
        return threads_cpu_s()

    def flush(self, timeout_s: float, *, is_asked: bool = False) -> bool:
        """Wait until everything put so far is acknowledged; False if that took too long.

        `is_asked`: the user wants to see the open step, even if the process is killed during it.
        """
        if self._is_closed:
            return self._shared.is_complete
        barrier = Barrier(SimpleQueue(), is_asked)
        self._queue.add(barrier)
        self._queue.wake()
        try:
            return barrier.reply.get(timeout=max(timeout_s, 0.0))
        except Empty:
            return False

    def close(
        self,
        status: RunStatus,
        *,
        reason: str = "",
        deadline_s: float = 10.0,
        last_facts: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Drain, write the status, seal, release. Returns at the deadline even if the disk does not respond.
        `last_facts` is called on the writer thread when all else is done, for facts about the end itself."""
        if self._is_closed:
            return
        end = time.monotonic() + deadline_s
        self._environment.join(min(_ENVIRONMENT_PATIENCE_S, deadline_s))
        self._is_closed = True
        announcing = threading.Thread(target=announce_ending, args=(self.run, status, reason), daemon=True)
        announcing.start()
        announcing.join(min(_ANNOUNCING_PATIENCE_S, deadline_s))
        self._shared.shutdown = Shutdown(status, reason, end, last_facts)
        self._queue.wake()
        self._wait_for_the_end(end)

    def _wait_for_the_end(self, end: float) -> None:
        """Wait for the records and the status, and for the sealing unless the disk is slow: then it continues alone."""
        while self._thread.is_alive() and time.monotonic() < end:
            if self._shared.said.is_set() and self._shared.is_slow:
                _closing[self.run] = self._thread
                return
            self._thread.join(_POLL_S)

    def abandon(self) -> None:
        """In a forked child: forget everything. The parent's files are not touched; our copies of them are closed."""
        self._is_closed = True
        self._queue, self._shared = BoundedQueue(0), Shared()
        self._lock.forget()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            for stream in recorder.streams.values():
                stream.close()
            _abandoned.append(recorder)

    # ---------------------------------------------------------------------------------------------------- writer thread

    def _main(
        self,
        answer: SimpleQueue[Recorder | BaseException],
        resume: bool,
        is_same_attempt: bool,
        on_warning: Callable[[str], None],
        observer: Observer | None,
    ) -> None:
        if self._on_beat is not None:
            self._on_beat()
        try:
            recorder = Recorder(
                self.run,
                self.options,
                self._queue,
                self._shared,
                on_warning,
                resume=resume,
                is_same_attempt=is_same_attempt,
                observer=observer,
                on_beat=self._on_beat,
            )
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            answer.put(error)
            return
        answer.put(recorder)
        try:
            recorder.work()
        except Exception as error:  # noqa: BLE001  no thread is left to retry: stop taking records, and say why
            self._is_closed = True
            self._shared.degraded = f"the writer stopped: {error!r}"
        finally:
            self._lock.release()

    # -------------------------------------------------------------------------------------------------------- internals

    def _begin(self, answer: Recorder | BaseException) -> None:
        if isinstance(answer, sqlite3.DatabaseError) and not isinstance(answer, sqlite3.OperationalError):
            raise CorruptError(f"the catalog of {self.run} is damaged ({answer}). Start a new run.") from answer
        if isinstance(answer, OSError | sqlite3.Error):
            raise RunError(
                f"cannot write to {self.run}: {answer}. Free some space, or choose another folder with dir= or "
                "SONDE_DIR."
            ) from answer
        if isinstance(answer, BaseException):
            raise answer
        self._recorder = answer
        self.next_step = answer.next_step
        self._ids_by_name = {(site.kind, site.name): id for id, site in answer.sites.items()}
        self._shards = dict(answer.shards)
        self._site_ids = {site: id for id, site in answer.sites.items()}
        self._ids_by_scalar = {name: id for id, name in answer.scalars.items()}
        self._next_site = itertools.count(max(answer.sites, default=-1) + 1)
        self._next_scalar = itertools.count(max(answer.scalars, default=-1) + 1)

    def _learn_site(self, site: Site) -> int:
        """`setdefault` decides between two threads; an unused number does not matter."""
        id = self._ids_by_name.setdefault((storable_site(site.kind), storable_site(site.name)), next(self._next_site))
        # Also if the site was known with another shape: the newest description is kept.
        if self._site_ids.setdefault(site, id) == id and not self._is_closed:
            self._queue.add(NewSite(id, site))
        return id

    def _learn_scalar(self, name: str) -> int:
        text = storable_name(name)
        new = next(self._next_scalar)
        id = self._ids_by_scalar.setdefault(text, new)
        self._scalar_ids[name] = id
        if id == new and not self._is_closed:
            self._queue.add(NewScalar(id, text))
        return id


def wait_for_closing(run: Path) -> None:
    """If this process has just finished the run, its writer may still hold it."""
    thread = _closing.pop(run, None)
    if thread is not None:
        thread.join(_CLOSING_PATIENCE_S)


def _describe(queue: BoundedQueue, folder: Path | None) -> None:
    """git may be slow: neither training nor the writer waits for it."""
    git = None if folder is None else git_state(folder)
    queue.add(Facts({"environment": {"packages": package_versions()}, "git": git}, is_top=True))
    note_thread_time()
