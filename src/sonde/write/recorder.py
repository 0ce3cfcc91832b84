"""The work of the writer thread: reads the queue, writes, acknowledges, seals, sends heartbeats. Survives disk
failures.

Each turn stores in this order: catalog rows (a site is known before a frame refers to it), frames of sketches and their
`fdatasync`, then those of scalars. Only then is anything acknowledged. When a turn fails, nothing is discarded: the
rows and frames wait, the queue fills up and refuses, and the turn is retried until the disk responds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.schema.addends import Addends
from sonde.schema.layout import ENDED_AT_EXIT, FORMAT_VERSION, STREAMS, UNSHARDED_VERSION, RunStatus, Stream
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord, sign_document, to_json
from sonde.schema.words import MIB, in_words
from sonde.write.durable import sync_folder, write_durably
from sonde.write.ending import forget_endings
from sonde.write.items import (
    AttemptNumber,
    Barrier,
    Document,
    Facts,
    FindingRow,
    KeptRow,
    NewAttempt,
    NewScalar,
    NewShard,
    NewSite,
    StepBegan,
    check_record,
)
from sonde.write.observer import GuardedObserver, Observer, Output
from sonde.write.options import WriterOptions
from sonde.write.queue import BoundedQueue
from sonde.write.runfile import RunFile
from sonde.write.stats.addend_log import AddendLog
from sonde.write.stats.attempts import Attempts
from sonde.write.stats.catalog import (
    Catalog,
    Row,
    event_row,
    finding_row,
    kept_row,
    scalar_row,
    shard_row,
    site_row,
    system_rows,
)
from sonde.write.stats.journal import Journal
from sonde.write.stats.line_catalog import LineCatalog
from sonde.write.stats.sealer import Sealer
from sonde.write.stats.stream import StreamWriter
from sonde.write.system import SystemSampler
from sonde.write.thread_time import note_thread_time

MAX_EVENTS: Final = 10_000
_MAX_REASONS: Final = 20
"""Maximum number of reasons for refused records that become an event."""
_SLOW_S: Final = 2.0
"""If the last records and the status take longer than this, the disk counts as slow."""
_FIRST_BACKOFF_S: Final = 0.5
_LAST_BACKOFF_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """How the run ended, and until when (monotonic) to wait for the disk."""

    status: RunStatus
    reason: str
    end: float
    last_facts: Callable[[], dict[str, Any]] | None = None
    """Facts that are known when all else is written. Must not raise."""


@dataclass(slots=True)
class Shared:
    """State shared by both threads. Each field has one writer."""

    step: int = -1
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    """Written by the training thread."""
    first_dropped_step: int = -1
    last_dropped_step: int = -1
    degraded: str = ""
    """Written by the writer thread."""
    failed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    """Records that could not be created or encoded. Written by the writer thread."""
    shutdown: Shutdown | None = None
    is_complete: bool = False
    """Whether everything that was put is on disk and the writer thread has ended."""
    said: threading.Event = field(default_factory=threading.Event)
    """Set when everything that was put, and the final status, is on disk; only cleanup follows."""
    is_slow: bool = False
    """Whether that took so long that `close` does not wait for the rest."""

    def num_dropped(self) -> dict[str, int]:
        return {stream: self.dropped[stream] + self.failed[stream] for stream in STREAMS}


class Recorder:
    """Created and used in the writer thread only."""

    def __init__(
        self,
        run: Path,
        options: WriterOptions,
        queue: BoundedQueue,
        shared: Shared,
        warn: Callable[[str], None],
        *,
        resume: bool,
        is_same_attempt: bool = False,
        observer: Observer | None = None,
        on_beat: Callable[[], None] | None = None,
    ) -> None:
        self._on_beat = on_beat
        self.run, self.options, self.queue, self.shared, self._warn = run, options, queue, shared, warn
        self.file = RunFile.load(run)
        self.catalog: Catalog | LineCatalog = LineCatalog(run) if options.rank else Catalog(run)
        self._facts: dict[str, Any] = dict(self.file.content.get("facts") or {})
        self.sites: dict[int, Site] = self.catalog.sites()
        self.scalars: dict[int, str] = self.catalog.scalar_names()
        segments = self.catalog.segments()
        self.streams: dict[Stream, StreamWriter] = {
            stream: StreamWriter(run, stream, options.rank, segments) for stream in STREAMS
        }
        self.attempts = Attempts(
            self.catalog.attempts(), lambda stream: self.streams[stream].next_sequence, rank=options.rank
        )
        self._journal = Journal(
            self.streams,
            self.attempts,
            self.file.content,
            is_same_attempt=is_same_attempt,
            first_step=options.first_step,
        )
        self.next_step = self._journal.next_step
        self._sealing = Sealer(
            run,
            options,
            self.catalog,
            self.streams,
            segments,
            self.attempts,
            remember=lambda kind, message, severity: self._remember(self._event(kind, message, severity)),
            tell=lambda what: self._warn_once(what, "Nothing recorded is lost; sonde will retry."),
        )
        self._rows: list[Row] = []
        self.shards = self.catalog.shards()
        """The parts of sharded sites that this process holds, by site."""
        self._must_mark_sharded = False
        self._addends = AddendLog(run)
        self._barriers: list[Barrier] = []
        self._numbers: list[tuple[AttemptNumber, int]] = []
        """Numbers to set once their attempts are in the catalog."""
        self._documents: dict[str, str] = {}
        self._num_events = 0
        self._sampler = SystemSampler(self.run) if options.system_interval_s > 0 else None
        self._has_warned = False
        self._refused: set[str] = set()
        self._store_error = ""
        self._trouble_since = 0.0
        self._dropped_before = 0
        self._reported_drops = 0
        self._backoff_s = _FIRST_BACKOFF_S
        self._next_try = self._next_beat = self._next_sample = 0.0
        self._is_warm = False
        self._observer = GuardedObserver(observer, self._on_observer_error)
        self._first_finding = self.catalog.next_finding()
        self._start(resume)
        self._observer.begin(self.sites, self.scalars, self.file.content)

    # -------------------------------------------------------------------------------------------------------- main loop

    def work(self) -> None:
        """Run until shutdown."""
        self._seal_due(time.monotonic())  # data of an earlier writer first, before new data is mixed with it
        while self.shared.shutdown is None:
            self.queue.wait(self.options.flush_interval_s)
            self.turn()
            if not self._is_warm:
                self._warm_up()
            note_thread_time()
        self._finish(self.shared.shutdown)
        note_thread_time()

    def turn(self, *, is_last: bool = False) -> None:
        """Do everything that is due; at the end no more than was put. Never raises."""
        now = time.monotonic()
        if self._store_error and now < self._next_try:
            return
        try:
            num_left = self.queue.num_items  # not "until empty": training may put faster than the disk takes
            while True:
                num_left -= self._take()
                self._store()
                self._clear_error()
                if num_left <= 0:
                    break
            if is_last:
                return
            self._beat(now)
            self._keep_outputs(self._observer.poll(now))
        except Exception as error:  # noqa: BLE001  nothing may end this thread; failures are reported, counted and retried
            self._on_store_error(error)
            return
        self._seal_due(now)

    def _take(self) -> int:
        """Move items from the queue to the buffers for the disk; none while older ones still wait."""
        if self._store_error:
            return 0
        num_taken = 0
        self._journal.begin_turn()
        for item in self.queue.take(int(self.options.flush_mib * MIB)):
            num_taken += 1
            try:
                self._accept(item)
            except Exception as error:  # noqa: BLE001  one bad item must not stop the others
                self._refuse(item, error)
            if self._journal.must_store:
                return num_taken
        num_scalars = self._journal.num_pending
        try:
            self._sealing.num_scalar_rows += self._journal.end_turn()
        except Exception as error:  # noqa: BLE001  as above
            self._refuse(None, error, num_scalars)
        return num_taken

    def _accept(self, item: Any) -> None:
        if callable(item):
            item = item()
        if isinstance(item, list):
            for one in item:
                self._accept(one)
            return
        if isinstance(item, StatsRecord | ScalarsRecord):
            check_record(item)
            self._journal.add(item)
        elif isinstance(item, Addends):
            self._addends.add(item, self._journal.require_frame())
        elif isinstance(item, StepBegan):
            self._sealing.num_scalar_rows += self._journal.step_began(item)
        elif isinstance(item, NewAttempt):
            self._sealing.num_scalar_rows += self._journal.return_to(item)
        elif isinstance(item, Event):
            self._remember(item)
        elif isinstance(item, NewSite):
            self._rows.append(site_row(item.id, item.site))
        elif isinstance(item, NewShard):
            self._rows.append(shard_row(item.id, item.shard))
            self.shards[item.id] = item.shard
            self._must_mark_sharded = self.file.content["format"] != FORMAT_VERSION
        elif isinstance(item, NewScalar):
            self._rows.append(scalar_row(item.id, item.name))
        elif isinstance(item, Facts):
            self._add_facts(item)
        elif isinstance(item, Document):
            self._documents[item.name] = sign_document(to_json(item.content))
        elif isinstance(item, Barrier):
            self._barriers.append(item)
            if item.is_asked:
                self._journal.asked_for()
        elif isinstance(item, KeptRow):
            attempt = self.attempts.at(item.time) if item.attempt is None else item.attempt
            self._rows.append(kept_row(item, attempt))
        elif isinstance(item, AttemptNumber):
            self._numbers.append((item, self._journal.require_frame()))
        elif item is not None:
            raise TypeError(f"expected a record, got {type(item).__name__}")
        if isinstance(item, StatsRecord) and self.shards:
            item = self._without_shards(item)
        if item is not None and not isinstance(
            item, Barrier | KeptRow | StepBegan | AttemptNumber | NewShard | Addends
        ):
            self._observer.on_item(item)

    def _without_shards(self, record: StatsRecord) -> StatsRecord:
        """The record for observers: rules and mirrors must not take the shard of one rank for the whole tensor."""
        is_whole = ~np.isin(record.site_ids, list(self.shards))
        has_hist = is_whole[record.hist_index]
        place = np.cumsum(is_whole, dtype=np.int32) - 1
        return StatsRecord(
            record.step,
            record.time,
            record.site_ids[is_whole],
            record.rows[is_whole],
            place[record.hist_index[has_hist]],
            record.hist[has_hist],
        )

    def _store(self) -> None:
        if self._must_mark_sharded:
            # Before the first shard is on disk: an earlier version of sonde would show it as the whole tensor.
            self.file.fix(format=FORMAT_VERSION)
            self.file.write(heartbeat=self._heartbeat(), facts=self._facts)
            self._must_mark_sharded = False
        new = self._journal.rows()
        if self._rows or new:
            self.catalog.commit([*new, *self._rows])
            self._rows = []
        if new:
            self.attempts.have_stored()
            self._next_beat = 0.0
        while self._documents:
            name, text = next(iter(self._documents.items()))
            write_durably(self.run / name, text.encode())
            del self._documents[name]
        self._addends.flush()  # before the mark in the scalars, which covers them
        self._journal.flush()
        for asked, number in self._numbers:
            asked.tell(number)
        self._numbers = []
        for barrier in self._barriers:
            barrier.reply.put(True)
        self._barriers = []

    # --------------------------------------------------------------------------------------------------------- observer

    def _keep_outputs(self, outputs: Iterable[Output]) -> None:
        rows = [self._row_of(item) for item in outputs]
        if rows:
            self._rows.extend(row for row in rows if row is not None)
            self._store()

    def _row_of(self, item: Output) -> Row | None:
        if isinstance(item, FindingRow):
            return finding_row(self._first_finding + item.number, item, self._journal.attempt)
        if isinstance(item, Event):
            self._remember(item)
        else:
            self._add_facts(item)
        return None

    def _on_observer_error(self, error: Exception) -> None:
        self._remember(self._event("observer_failed", f"live findings are switched off: {in_words(error)}"))

    def _seal_due(self, now: float, *, force: bool = False) -> None:
        if not self._store_error:
            self._sealing.seal_due(now, force=force)
            self._show_trouble()

    # ---------------------------------------------------------------------------------------------------- disk failures

    def _on_store_error(self, error: Exception) -> None:
        now = time.monotonic()
        if not self._store_error:
            self._trouble_since = time.time()
            self._dropped_before = sum(self.shared.num_dropped().values())
            self._backoff_s = min(_FIRST_BACKOFF_S, self.options.flush_interval_s)
        self._store_error = in_words(error)
        self._next_try = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LAST_BACKOFF_S)
        self._show_trouble()
        self._warn_once(
            f"cannot write to {self.run}: {self._store_error}", "Training continues; recording waits for the disk."
        )

    def _clear_error(self) -> None:
        """The disk responds again: report what the failure cost."""
        if not self._store_error:
            return
        why, self._store_error = self._store_error, ""
        self._show_trouble()
        num_dropped = sum(self.shared.num_dropped().values()) - self._dropped_before
        seconds = max(time.time() - self._trouble_since, 0.0)
        self._remember(
            Event(
                type="gap",
                severity="warning",
                step=self.shared.step,
                time=time.time(),
                message=f"nothing could be written for {seconds:.1f} s ({why}); {num_dropped} records were dropped",
                details={"since": self._trouble_since, "num_dropped": num_dropped, "reason": why},
            )
        )

    def _show_trouble(self) -> None:
        self.shared.degraded = self._store_error or self._sealing.error

    def _warn_once(self, what: str, consequence: str) -> None:
        """Warn once per run; after that, see `degraded` and the events."""
        if self._has_warned:
            return
        self._has_warned = True
        try:
            self._warn(f"{what}. {consequence}")
        except Exception as error:  # noqa: BLE001  the callback is not ours
            self._remember(self._event("warning_failed", f"the warning could not be shown: {in_words(error)}"))

    def _refuse(self, item: Any, error: Exception, num_records: int = 1) -> None:
        if not isinstance(item, Event | NewSite | NewShard | NewScalar | Facts | Document):
            self.shared.failed["scalars" if item is None or isinstance(item, ScalarsRecord) else "stats"] += num_records
        why = in_words(error)
        if why not in self._refused and len(self._refused) < _MAX_REASONS:
            self._refused.add(why)
            self._remember(self._event("record_failed", f"a record could not be written: {why}"))

    def _event(self, type: str, message: str, severity: Any = "warning", **details: Any) -> Event:
        return Event(
            type=type, message=message, severity=severity, step=self.shared.step, time=time.time(), details=details
        )

    def _remember(self, event: Event) -> None:
        self._num_events += 1
        if self._num_events == MAX_EVENTS:
            event = self._event("warning", f"more than {MAX_EVENTS:,} events; further ones are not recorded")
        if self._num_events <= MAX_EVENTS:
            self._rows.append(event_row(event, self._journal.attempt))

    # -------------------------------------------------------------------------------------------------------- heartbeat

    def _beat(self, now: float) -> None:
        if self._sampler is not None and now >= self._next_sample:
            self._next_sample = now + self.options.system_interval_s
            sample = self._sampler.sample(self.shared.step)
            self._rows.extend(system_rows(sample, self._journal.attempt))
            self._observer.on_item(sample)
        if now >= self._next_beat:
            self._next_beat = now + self.options.heartbeat_s
            self._report_drops()
            self._store()
            self.file.write(sync_name=False, heartbeat=self._heartbeat(), facts=self._facts)
            if self._on_beat is not None:
                self._on_beat()

    def _heartbeat(self) -> dict[str, Any]:
        return {
            "time": time.time(),
            "step": self.shared.step,
            "attempt": self.attempts.num_stored - 1,
            "acknowledged": {name: stream.acknowledged for name, stream in self.streams.items()},
            "dropped": self.shared.num_dropped(),
            "failed": dict(self.shared.failed),
            "degraded": self.shared.degraded,
        }

    def _report_drops(self) -> None:
        num_dropped = sum(self.shared.dropped.values())
        if num_dropped == self._reported_drops:
            return
        new, self._reported_drops = num_dropped - self._reported_drops, num_dropped
        first, last = self.shared.first_dropped_step, self.shared.last_dropped_step
        self.shared.first_dropped_step = -1
        message = (
            f"{new} records between steps {first} and {last} were dropped: the disk was slower than training, and the "
            "queue was full"
        )
        self._remember(self._event("dropped", message, num_dropped=new, first_step=first, last_step=last))

    def _add_facts(self, item: Facts) -> None:
        to_json(item.facts)  # reject facts that cannot be written here, not at every heartbeat
        if not item.is_top:
            self._facts.update(item.facts)
            return
        for key, value in item.facts.items():
            old = self.file.content.get(key)
            self.file.fix(
                **{key: {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value}
            )
        self._next_beat = 0.0

    def _start(self, resume: bool) -> None:
        """Record the current writer, and problems that an earlier writer left."""
        was = self.file.content.get("status")
        self.shared.step = self.next_step - 1
        if resume and not self.attempts.is_new:  # a new attempt has its own event
            self._remember(self._event("resumed", f"resumed at step {self.next_step}; the run was {was}", "info"))
        for name, stream in self.streams.items():
            if stream.num_damaged_bytes:
                message = (
                    f"{stream.num_damaged_bytes} bytes in the log of {name} are damaged; the records in them are lost"
                )
                self._remember(self._event("damaged", message, "critical"))
        forget_endings(self.run)
        self._facts.pop(ENDED_AT_EXIT, None)
        version = max(int(self.file.content["format"]), UNSHARDED_VERSION)
        self.file.fix(format=version, pid=os.getpid(), host=socket.gethostname(), rank=self.options.rank)
        self.file.write(status="running", reason="", ended_time=None, heartbeat=self._heartbeat(), facts=self._facts)
        self._next_beat = time.monotonic() + self.options.heartbeat_s

    def _warm_up(self) -> None:
        """Import the packages for sealing while training is still starting."""
        self._is_warm = True
        with contextlib.suppress(Exception):  # a missing or damaged package: sealing will report it
            import sonde.write.stats.parquet  # noqa: F401

    # --------------------------------------------------------------------------------------------------------- shutdown

    def _finish(self, shutdown: Shutdown) -> None:
        """Drain, write the final status, seal. If time runs out while sealing, the status is written and the log is
        complete."""
        began = time.monotonic()
        self._next_try = 0.0
        self.turn(is_last=True)
        while (self._store_error or not self.queue.is_empty) and time.monotonic() < shutdown.end:
            time.sleep(0.02)
            self.turn(is_last=True)
        num_lost = sum(stream.num_waiting for stream in self.streams.values()) + self.queue.num_items
        if self._store_error:
            self._has_warned = False
            self._warn_once(
                f"the last records could not be written to {self.run}: {self._store_error}",
                f"At least {num_lost} records are lost.",
            )
        try:
            self._report_drops()
            self._keep_outputs(self._observer.finish(shutdown.status))
            self._sealing.num_scalar_rows += self._journal.end_attempt()
            self._store()
            self._write_final_status(shutdown)
            self.shared.is_slow = time.monotonic() - began > _SLOW_S
            self.shared.said.set()
            sync_folder(self.run)
        except Exception as error:  # noqa: BLE001  as above
            self._on_store_error(error)
        self._seal_due(time.monotonic(), force=True)
        try:
            self._store()
        except Exception as error:  # noqa: BLE001  as above
            self._on_store_error(error)
        if shutdown.last_facts is not None and self.shared.said.is_set():
            with contextlib.suppress(OSError):  # the run is complete without them
                self._facts.update(shutdown.last_facts())
                self.file.write(sync_name=False, facts=self._facts)
        for stream in self.streams.values():
            stream.close()
        self._addends.close()
        self.catalog.close()
        self.shared.is_complete = not self._store_error and self.queue.is_empty

    def _write_final_status(self, shutdown: Shutdown) -> None:
        self.file.write(
            sync_name=False,
            status=shutdown.status,
            reason=shutdown.reason,
            ended_time=time.time(),
            heartbeat=self._heartbeat(),
            facts=self._facts,
        )
        forget_endings(self.run)
