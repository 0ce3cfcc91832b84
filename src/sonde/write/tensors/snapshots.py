"""Writes snapshots to the store on a separate thread, so that the writer of statistics is never delayed.

A snapshot is acknowledged when the store has it and the catalog has its row, in this order: a row never refers to
something missing. Failures are reported and counted; none reaches the training thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Final, Literal

from sonde.errors import RunError, SondeError
from sonde.schema.snapshots.tensors import Snapshot, SnapshotKey
from sonde.write.items import AttemptNumber, KeptRow
from sonde.write.tensors.store import Receipt, Store
from sonde.write.thread_time import lower_priority, note_thread_time
from sonde.write.writer import Writer

_ROW_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.005
_TELL_S: Final = 10.0
_CLOSE_S: Final = 5.0
_abandoned: list[Any] = []
"""Objects that must stay alive in a forked child: a destructor would touch the parent's files."""

State = Literal["taken", "exists", "changed", "failed", "lost"]


def abandon(*things: Any) -> None:
    """In a forked child: keep these for ever, and release what only the parent may hold."""
    for thing in things:
        forget = getattr(thing, "forget_in_child", None)
        if forget is not None:
            forget()
    _abandoned.append(things)


class ChangedError(Exception):
    """A tensor was modified while it was being copied: the whole copy is discarded."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A snapshot whose tensors may still be being copied."""

    step: int
    time: float
    reason: str
    nbytes: int
    resolve: Callable[[], Snapshot]
    """Waits for the copies. Raises ChangedError if they do not belong together."""
    release: Callable[[], None]
    """Returns the memory."""
    attempt: AttemptNumber = field(default_factory=lambda: AttemptNumber(0))
    """The attempt that its step belongs to."""
    tickets: tuple[str, ...] = ()
    """Ids of the requests that wait for an answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    pending: Pending
    state: State
    why: str = ""
    receipt: Receipt | None = None
    error: Exception | None = field(default=None, compare=False)
    upload: dict[str, Any] | None = None
    """The upload progress of a remote store."""


class SnapshotWriter:
    """Takes `Pending` snapshots in order; calls `on_done` with each outcome, on this thread."""

    def __init__(
        self,
        open: Callable[[], Store],
        store_name: str,
        writer: Writer,
        on_done: Callable[[Outcome], None],
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.store_name, self._open, self._writer = store_name, open, writer
        self._on_done, self._on_error = on_done, on_error
        self._store: Store | None = None
        self._known: set[SnapshotKey] = set()
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        # Two counters, each with one writer: `+=` on a shared one would lose updates.
        self._num_put = self._num_done = 0
        self._has_given_up = False
        self.upload: dict[str, Any] | None = None
        """The upload progress of a remote store when it was closed."""
        self._thread = threading.Thread(target=self._work, name="sonde-snapshots", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Snapshots that were passed in and are not done."""
        return self._num_put - self._num_done

    @property
    def num_done(self) -> int:
        """Snapshots that have finished, one way or another."""
        return self._num_done

    @property
    def written_bytes(self) -> int:
        """Bytes written by the store so far, if it counts them: grows while a snapshot is written."""
        return int(getattr(self._store, "written_bytes", 0))

    def put(self, pending: Pending) -> None:
        """Called on the training thread; never waits."""
        self._num_put += 1
        self._queue.put(pending)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every snapshot passed in so far is done."""
        wanted, end = self._num_put, time.monotonic() + timeout_s
        while self._num_done < wanted and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(_POLL_S)
        return self._num_done >= wanted

    def drain(self, patience_s: float, tell: Callable[[], None]) -> bool:
        """Wait for open snapshots as long as there is progress. False: there was none for `patience_s`."""
        seen, since = (-1, -1), time.monotonic()
        told = since
        while not self.flush(min(_TELL_S, patience_s) / 4):
            made, now = (self._num_done, self.written_bytes), time.monotonic()
            if made != seen:
                seen, since = made, now
            elif now - since >= patience_s:
                return False
            if now - told >= _TELL_S:
                told = now
                tell()
        return True

    def close(self, deadline_s: float, *, is_patient: bool = False) -> bool:
        """Wait for open snapshots until the deadline, then stop. False: some are lost, and were reported.

        `is_patient`: a remote store has its configured time for uploads.
        """
        is_done = self.flush(deadline_s)
        self._has_given_up = not is_done
        self._queue.put(None)
        if is_done:
            self._thread.join(_CLOSE_S + (getattr(self._store, "close_s", 0.0) if is_patient else 0.0))
        return is_done

    def abandon(self) -> None:
        """In a forked child: the store is the parent's."""
        abandon(self._store, self._queue)
        self._store, self._queue = None, SimpleQueue()
        self._num_put = self._num_done = 0

    # --------------------------------------------------------------------------------------------------- writing thread

    def _work(self) -> None:
        lower_priority()
        while (pending := self._queue.get()) is not None:
            self._done(replace(self._kept(pending), upload=self._upload()))
            note_thread_time()
        if self._store is not None:
            self._store.close()
            self.upload = self._upload()

    def _upload(self) -> dict[str, Any] | None:
        status = getattr(self._store, "status", None)
        return status() if status is not None else None

    def _done(self, outcome: Outcome) -> None:
        try:
            outcome.pending.release()
            self._on_done(outcome)
        except Exception as error:  # noqa: BLE001  the next one must still be written
            self._on_error("snapshot", error)
        finally:
            self._num_done += 1

    def _kept(self, pending: Pending) -> Outcome:
        if self._has_given_up:
            return Outcome(pending, "lost", "there was no time left to write it")
        try:
            return self._write(pending)
        except ChangedError as error:
            return Outcome(pending, "changed", str(error))
        except Exception as error:  # noqa: BLE001  nothing may end this thread; failures are reported and counted
            why = str(error).rstrip(".") if isinstance(error, SondeError) else f"{type(error).__name__}: {error}"
            return Outcome(pending, "failed", why[:500], error=error)

    def _write(self, pending: Pending) -> Outcome:
        store, key = self._opened(), self._key(pending)
        if key in self._known:
            self._writer.kept(self._row(pending, key, None))
            self._writer.flush(_ROW_PATIENCE_S)
            return Outcome(pending, "exists", f"{key} already has a snapshot, which is kept")
        snapshot = replace(pending.resolve(), attempt=key.attempt)
        receipt = store.write(snapshot)
        self._known.add(key)
        del snapshot  # its memory returns to the pool before the outcome is reported
        self._writer.kept(self._row(pending, key, receipt))
        if not self._writer.flush(_ROW_PATIENCE_S):
            why = "it is in the store, but its catalog row is still waiting for the disk"
            return Outcome(pending, "taken", why, receipt)
        return Outcome(pending, "taken", "", receipt)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open()
            attempts = self._store.attempts()
            self._known = {SnapshotKey(attempt, step) for attempt in attempts for step in self._store.steps(attempt)}
        return self._store

    def _key(self, pending: Pending) -> SnapshotKey:
        """Its attempt is in the catalog before the snapshot is in the store: readers must know what it abandons."""
        attempt = pending.attempt.wait(_ROW_PATIENCE_S)
        if attempt is None:
            why = self._writer.degraded or "the disk does not respond"
            raise RunError(f"its attempt could not be added to the catalog: {why}.")
        return SnapshotKey(attempt, pending.step)

    def _row(self, pending: Pending, key: SnapshotKey, receipt: Receipt | None) -> KeptRow:
        """Without a receipt: a snapshot whose process was killed between making it visible and writing its row."""
        details: dict[str, Any] = {"reason": pending.reason}
        if receipt is not None:
            kept = {name: getattr(receipt, name) for name in ("nbytes", "stored_bytes", "num_tensors", "sha256")}
            details |= {**kept, **({"store": dict(receipt.details)} if receipt.details else {})}
        return KeptRow(
            table="snapshots",
            step=pending.step,
            time=pending.time,
            where=self.store_name,
            details=details,
            attempt=key.attempt,
            is_found=receipt is None,
        )
