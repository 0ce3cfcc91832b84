"""Requests for snapshots: from the user's code, a finding, or another process by a file in the run folder. No torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from sonde.errors import UsageError
from sonde.session.snapshot_plan import check_kinds
from sonde.write.tensors.requests import Requests

if TYPE_CHECKING:
    from sonde.diagnose.finding import Finding

SCHEDULED = "scheduled"


class Ask:
    """A request for a snapshot of the next step."""

    __slots__ = ("kinds", "reason", "tickets")

    def __init__(self, reason: str, kinds: tuple[str, ...] | None = None, tickets: tuple[str, ...] = ()) -> None:
        self.reason, self.kinds, self.tickets = reason, kinds, tickets


class Asks:
    """A queue filled from any thread and emptied by the training thread."""

    def __init__(self, run: Path, refuse: Callable[[], str], on_error: Callable[[str, Exception], None]) -> None:
        self._refuse, self._on_error = refuse, on_error
        self._queue: SimpleQueue[Ask] = SimpleQueue()
        self._requests = Requests(run)
        self.on_put: Callable[[], None] | None = None
        """Called after each request, in the thread that makes it."""
        self.least = ""
        """The minimum severity of a finding that triggers a snapshot; empty: no finding does."""

    def put(self, ask: Ask) -> None:
        self._queue.put(ask)
        if self.on_put is not None:
            self.on_put()

    def __bool__(self) -> bool:
        """Whether there are requests."""
        return not self._queue.empty()

    def take(self) -> list[Ask]:
        asks = []
        with suppress(Empty):
            while True:
                asks.append(self._queue.get_nowait())
        return asks

    def found(self, finding: Finding) -> None:
        """Called on the writer thread, once for each rule."""
        if self.least and (self.least == "warning" or finding.severity == "critical"):
            self.put(Ask(f"finding {finding.rule}"))

    def poll(self) -> None:
        """Called on the writer thread at each heartbeat: checks for requests of other processes."""
        try:
            for request in self._requests.poll():
                why = self._take_request(request.id, request.content)
                if why:
                    self._requests.answer(request.id, state="refused", why=why)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the folder, recording continues
            self._on_error("requests", error)

    def _take_request(self, id: str, content: dict[str, Any]) -> str:
        """Why there will be no snapshot; empty if the request is queued."""
        if content.get("what") != "snapshot":
            return f'this version of sonde does not know the request "{content.get("what")}"'
        try:
            kinds = check_kinds(content.get("kinds"))
        except (UsageError, TypeError) as error:
            return str(error)
        why = self._refuse()
        if not why:
            is_awaited = content.get("wait") is not False
            if is_awaited:
                self._requests.answer(id, state="waiting")
            self.put(Ask("asked", kinds, (id,) if is_awaited else ()))
        return why

    def answer(self, tickets: tuple[str, ...], **content: Any) -> None:
        """Report the outcome to those who wait."""
        for ticket in tickets:
            self._requests.answer(ticket, **content)
