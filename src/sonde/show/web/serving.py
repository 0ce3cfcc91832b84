"""uvicorn with our settings: requests are not logged, and no connection stays open at shutdown."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn

from sonde.show.web.connections import BoundedProtocol
from sonde.show.web.guard import Guard


class QuickServer(uvicorn.Server):
    """A server that first closes the connections for live events, so that Ctrl-C does not wait for them."""

    def __init__(self, config: uvicorn.Config, app: Guard) -> None:
        super().__init__(config)
        self.app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.on_stop()
        await super().shutdown(sockets=sockets)


def serve(app: Guard, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM."""
    QuickServer(configured(app), app).run(sockets=[listening])


def configured(app: Guard) -> uvicorn.Config:
    asgi: Any = app  # starlette and uvicorn have different types for the same thing
    return uvicorn.Config(
        asgi,
        http=BoundedProtocol,  # with the strict parser, regardless of what else is installed
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        limit_concurrency=256,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=32_768,
    )
