"""Outcomes of snapshots: counted, reported once, recorded as events, and sent to whoever waits for one. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sonde.errors import RunError
from sonde.session.recording import Recording
from sonde.session.snapshots.requests import Ask, Asks

if TYPE_CHECKING:
    from sonde.write.tensors.snapshots import Outcome


class Ledger:
    """Used by the training thread (`skip`) and by the thread that writes snapshots (`done`)."""

    def __init__(self, recording: Recording, asks: Asks, on_changed: Callable[[], None]) -> None:
        self._recording, self._asks, self._on_changed = recording, asks, on_changed
        self.store = ""
        self.counts = {"taken": 0, "skipped": 0, "failed": 0}
        self._nbytes = self._stored_bytes = 0
        self._told: set[str] = set()
        self._upload: dict[str, Any] | None = None

    def skip(self, step: int, why: str, tickets: tuple[str, ...]) -> None:
        """Record a snapshot that will not be taken."""
        self.counts["skipped"] += 1
        message = f"the snapshot of step {step} was skipped: {why}"
        self._recording.event("snapshot_skipped", message, severity="warning", details={"step": step, "why": why})
        self._tell_once("skipped", f"{message}. Later skips are counted without a warning.")
        self.note()
        self._asks.answer(tickets, state="skipped", step=step, why=why)

    def done(self, outcome: Outcome) -> None:
        if outcome.state == "changed":
            self._again(outcome)
            return
        if outcome.state == "taken" and outcome.receipt is not None:
            self.counts["taken"] += 1
            self._nbytes += outcome.receipt.nbytes
            self._stored_bytes += outcome.receipt.stored_bytes
        elif outcome.state != "exists":
            self._failed(outcome)
        self.uploaded(outcome.upload)
        self.note()
        self._answer(outcome)

    def lose(self, num: int, why: str) -> None:
        """Record snapshots that were not written in time."""
        self.counts["failed"] += num
        message = f"{num} snapshot{'s were' if num > 1 else ' was'} lost: {why}"
        self._recording.event("snapshot_lost", message, severity="critical")
        self._recording.warn(f"{message}. Allow more time with finish_deadline_s.")

    def uploaded(self, upload: dict[str, Any] | None) -> None:
        """Record the progress of the upload, with an event when it starts to fail and when it works again."""
        if upload is None:
            return
        before = self._upload["last_error"] if self._upload else ""
        self._upload = upload
        if upload["last_error"] and not before:
            message = f"snapshots cannot be uploaded to {upload['url']}: {upload['last_error']}"
            self._recording.event("upload_failed", message, severity="warning", details=upload)
            self._tell_once(
                "upload",
                f"{message}. They stay on this machine until the upload succeeds; retry:  sonde snapshot --upload",
            )
        elif before and not upload["last_error"]:
            self._recording.event("upload_resumed", f"uploads to {upload['url']} work again", details=upload)

    def ended(self) -> None:
        """Warn about snapshots that are not uploaded when the run ends; a failed upload was already reported."""
        waiting = self._upload["waiting"] if self._upload else 0
        if self._upload is not None and waiting:
            snapshots = "1 snapshot is" if waiting == 1 else f"{waiting} snapshots are"
            message = f"{snapshots} not uploaded to {self._upload['url']} yet and stored locally"
            self._tell_once(
                "upload",
                f"{message}. The uploader keeps trying for a few minutes; after that, run:  sonde snapshot --upload",
            )

    def note(self) -> None:
        facts: dict[str, Any] = {"nbytes": self._nbytes, "stored_bytes": self._stored_bytes, "store": self.store}
        if self._upload is not None:
            facts["upload"] = self._upload
        self._recording.writer.note(snapshots={**self.counts, **facts})

    def _again(self, outcome: Outcome) -> None:
        """A tensor was modified while it was being copied: take a snapshot of the next step instead."""
        step, why = outcome.pending.step, outcome.why
        self._on_changed()
        self._recording.event("snapshot_again", f"the snapshot of step {step} will be taken one step later: {why}")
        self._asks.put(Ask(outcome.pending.reason, None, outcome.pending.tickets))

    def _failed(self, outcome: Outcome) -> None:
        self.counts["failed"] += 1
        message = f"the snapshot of step {outcome.pending.step} could not be written: {outcome.why}"
        self._recording.event("snapshot_failed", message, severity="critical", details={"step": outcome.pending.step})
        self._tell_once("failed", f"{message}. Training continues.")
        # A full or missing disk is not an internal failure: statistics are recorded as long as possible.
        if outcome.error is not None and not isinstance(outcome.error, OSError | RunError):
            self._recording.breaker("snapshot", outcome.error)

    def _answer(self, outcome: Outcome) -> None:
        receipt = outcome.receipt
        sizes = {} if receipt is None else {
            "nbytes": receipt.nbytes, "stored_bytes": receipt.stored_bytes, "num_tensors": receipt.num_tensors,
        }  # fmt: skip
        step = outcome.pending.step
        self._asks.answer(outcome.pending.tickets, state=outcome.state, step=step, why=outcome.why, **sizes)

    def _tell_once(self, key: str, message: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._recording.warn(message)
