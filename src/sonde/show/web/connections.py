"""Bounds on connections without a request: a deadline for each, and room for new ones. Reads no request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

REQUEST_S: Final = 10.0
"""How long a client may take to send a request, its body included."""
MAX_CONNECTIONS: Final = 192
"""Beyond this number, connections without a request are closed; below the number of requests served at once."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 by uvicorn, which itself waits forever for the first request of a connection."""

    _deadline: asyncio.TimerHandle | None = None
    opened_s = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.opened_s = self.loop.time()
        self._expect_request()
        if len(self.connections) > MAX_CONNECTIONS:
            _close_one(one for one in self.connections if isinstance(one, BoundedProtocol) and one.is_waiting)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and self.is_waiting:
            self._expect_request()
        super().data_received(data)
        if not self.is_waiting and not self.cycle.more_body:
            self._forget_deadline()

    def on_response_complete(self) -> None:
        self._forget_deadline()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    @property
    def is_waiting(self) -> bool:
        """Whether the client has not sent the head of a request that is still to be answered."""
        cycle: RequestResponseCycle | None = self.cycle  # None until the first request, whatever uvicorn declares
        return cycle is None or cycle.response_complete

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self.transport.close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _close_one(waiting: Iterable[BoundedProtocol]) -> None:
    """Close the oldest connection of the client that has the most."""
    found = list(waiting)
    if not found:
        return
    num_of = Counter(_host(one) for one in found)
    busiest = max(num_of, key=num_of.__getitem__)
    min((one for one in found if _host(one) == busiest), key=lambda one: one.opened_s).transport.close()


def _host(connection: BoundedProtocol) -> str:
    return connection.client[0] if connection.client else ""
