"""Checks of every request (method, Host, Origin, size, cookie), and the headers of every response."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Final

from sonde.show.web.access import Access
from sonde.show.web.query import MAX_QUERY_BYTES
from sonde.show.web.wire import to_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE"})
MAX_BODY_BYTES: Final = 16_384
MAX_HEADER_BYTES: Final = 32_768
MAX_PATH: Final = 2_000
LOGIN: Final = "/api/login"
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?", re.ASCII)
_SAME_SITE: Final = ("", "same-origin", "none")


class Guard:
    """Rejects invalid requests before they reach the application. A rejection names only the check that failed."""

    def __init__(
        self, app: App, access: Access, hosts: Collection[str], on_stop: Callable[[], None] = lambda: None
    ) -> None:
        self.app, self.access, self.on_stop = app, access, on_stop
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":  # not used
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is not None:
            await refuse(send, *refusal)
            return
        body = await _body(receive) if scope["method"] in ("POST", "DELETE") else b""
        if body is None:
            await refuse(send, 413, "too_large", f"the request body is larger than {MAX_BODY_BYTES:,} bytes")
            return
        await self.app(scope, _again(body, receive), send)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        headers = _Headers(scope)
        method, path = scope["method"], scope["path"]
        if method not in METHODS:
            return 405, "method", "only GET, POST and DELETE are allowed"
        if host_name(headers.one("host")) not in self.hosts:
            return 421, "host", "unknown host name; to allow it, start sonde ui with --allow-host NAME"
        if len(path) > MAX_PATH or sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            return 431, "too_long", "the URL or the headers are too long"
        if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            return 414, "too_long", "the query is too long"
        if not path.startswith("/api/"):
            return None if method in ("GET", "HEAD") else (405, "method", "only GET is allowed outside the API")
        if not self._is_same_origin(method, headers):
            return 403, "origin", "this request does not come from the dashboard"
        if path == LOGIN:
            return None
        if not self.access.is_allowed(headers.all("cookie"), headers.one("authorization")):
            return 401, "unauthorized", "open the URL that `sonde ui` printed; it ends in #token=…"
        return None

    def _is_same_origin(self, method: str, headers: _Headers) -> bool:
        """Whether the origin is our own: required for requests that change something, checked for others if present."""
        if headers.one("sec-fetch-site") not in _SAME_SITE:
            return False
        origin = headers.one("origin")
        if not origin:
            return method in ("GET", "HEAD")
        # Not just any of our names: a page on another local port is another origin but still receives our cookie.
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and host.lower() == headers.one("host").lower()


def host_name(host: str) -> str:
    """The name in a Host header; empty if invalid. The port may differ: it is the client's end of a tunnel.

    >>> host_name("localhost:7007"), host_name("[::1]:80"), host_name("evil.example:7007")
    ('localhost', '[::1]', 'evil.example')
    """
    match = _HOST.fullmatch(host.lower())
    return match[1] if match else ""


class _Headers:
    """Headers of a request; a duplicate of a header that must be unique counts as absent."""

    def __init__(self, scope: Scope) -> None:
        self._pairs = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def one(self, name: str) -> str:
        found = [value for own, value in self._pairs if own == name.encode()]
        return found[0] if len(found) == 1 else ("\0" if found else "")

    def all(self, name: str) -> str:
        return "; ".join(value for own, value in self._pairs if own == name.encode())


def _with_headers(send: Send) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *HEADERS]
        await send(message)

    return add


async def refuse(send: Send, status: int, code: str, message: str) -> None:
    body = to_json({"error": {"code": code, "message": message}})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes | None:
    """Read a small body completely; None if it is too large."""
    body: bytes = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return body
        body += bytes(message.get("body", b""))
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Replay the body that was read, then pass on later messages."""
    is_given = False

    async def give() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return give
