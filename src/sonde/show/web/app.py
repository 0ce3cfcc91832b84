"""The web application: API, pages and live events behind the guard. Runs are read on threads, not the event loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sonde.show.web.access import Access
from sonde.show.web.answering import Answers
from sonde.show.web.assets import Asset, load_assets
from sonde.show.web.guard import LOGIN, Guard
from sonde.show.web.live import News, TooManyListenersError
from sonde.show.web.query import BadRequestError
from sonde.show.web.wire import JSON, Reply, to_json

NUM_THREADS: Final = 8
"""Maximum number of concurrent requests; more of them wait."""
_MIN_GZIP_BYTES: Final = 512
_NO_STORE: Final = {"Cache-Control": "no-store"}


class BusyError(BadRequestError):
    """Every connection for live events is in use."""

    status, code = 503, "busy"


class UnauthorizedError(BadRequestError):
    """The token is wrong."""

    status, code = 401, "unauthorized"


class _Server:
    """The endpoints."""

    def __init__(self, answers: Answers, access: Access, assets: dict[str, Asset]) -> None:
        self.answers, self.access, self.assets = answers, access, assets
        self.news = News(answers.table)
        self.answers.briefs.on_ready = self._brief_is_ready
        self._threads: anyio.CapacityLimiter | None = None

    def _brief_is_ready(self, id: str, brief: dict[str, Any]) -> None:
        self.news.tell_from_thread({"type": "brief", "run": id, "brief": brief})

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.news.close()
        self.answers.close()

    async def api(self, request: Request) -> Response:
        path = request.url.path
        accepts_gzip = "gzip" in request.headers.get("accept-encoding", "")
        if request.method in ("GET", "HEAD"):
            query = request.url.query
            return await self._work(lambda: self.answers.get(f"{path}?{query}" if query else path), accepts_gzip)
        if request.method == "DELETE":
            response = await self._work(lambda: self.answers.delete(path), accepts_gzip)
        else:
            body = await request.body()
            response = await self._work(lambda: self.answers.post(path, _parsed(body)), accepts_gzip)
        if response.status_code == 200:
            self.news.notify({"type": "findings" if path.endswith("/state") else "runs"})
        return response

    async def _work(self, work: Callable[[], Reply], accepts_gzip: bool) -> Response:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(NUM_THREADS)
        return await run_sync(_respond, work, accepts_gzip, limiter=self._threads)

    async def login(self, request: Request) -> Response:
        given = _try_parsed(await request.body())
        if not isinstance(given, dict) or not self.access.is_token(given.get("token")):
            return _error(UnauthorizedError("wrong token: open the URL that the running `sonde ui` printed"))
        return Response(status_code=204, headers={"Set-Cookie": self.access.set_cookie(), **_NO_STORE})

    async def events(self, request: Request) -> Response:
        try:
            self.news.check_room()
        except TooManyListenersError:
            return _error(BusyError("too many dashboard pages are open; close some"))
        headers = {**_NO_STORE, "X-Accel-Buffering": "no"}
        return StreamingResponse(self.news.listen(), media_type="text/event-stream", headers=headers)

    async def page(self, request: Request) -> Response:
        """Serve a file under /static/; every other path returns the application, which does its own routing."""
        path = request.url.path
        if path.startswith("/static/"):
            asset = self.assets.get(path.removeprefix("/static/"))
        else:
            asset = self.assets["index.html"] if "." not in path.rpartition("/")[2] else self.assets.get(path[1:])
        if asset is None:
            return Response("not found", 404, media_type="text/plain")
        return _asset_response(asset, request)


def _respond(work: Callable[[], Reply], accepts_gzip: bool) -> Response:
    try:
        reply = work()
    except BadRequestError as error:
        return _error(error)
    headers = {**_NO_STORE, "Vary": "Accept-Encoding"}
    body = reply.body
    if accepts_gzip and len(body) >= _MIN_GZIP_BYTES:
        body = reply.gzipped
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type=reply.media, headers=headers)


def _error(error: BadRequestError) -> Response:
    body = to_json({"error": {"code": error.code, "message": str(error)[:4000]}})
    return Response(body, error.status, media_type=JSON, headers=_NO_STORE)


def _asset_response(asset: Asset, request: Request) -> Response:
    headers = {"ETag": asset.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    body = asset.body
    if "gzip" in request.headers.get("accept-encoding", "") and len(asset.gzipped) < len(asset.body):
        body = asset.gzipped
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type=asset.media, headers=headers)


def _parsed(body: bytes) -> Any:
    if not body:
        return None
    found = _try_parsed(body)
    if found is None:
        raise BadRequestError("the request body is not valid JSON")
    return found


def _try_parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def make_app(
    answers: Answers, access: Access, hosts: Collection[str], *, assets: dict[str, Asset] | None = None
) -> Guard:
    """The application behind its guard. `hosts` are the accepted host names, without ports."""
    server = _Server(answers, access, load_assets() if assets is None else assets)
    routes = [
        Route(LOGIN, server.login, methods=["POST"]),
        Route("/api/events", server.events, methods=["GET"]),
        Route("/api/{rest:path}", server.api, methods=["GET", "POST", "DELETE"]),
        Route("/{rest:path}", server.page, methods=["GET"]),
    ]
    inner = Starlette(routes=routes, lifespan=server.lifespan, exception_handlers={Exception: _failed})
    return Guard(inner, access, hosts, server.news.close)


async def _failed(request: Request, error: Exception) -> Response:
    """Reply to an internal error: the page reports it, and the traceback is in the terminal."""
    body = to_json(
        {
            "error": {
                "code": "failed",
                "message": f"internal error in sonde: {type(error).__name__} (see the terminal of `sonde ui`)",
            }
        }
    )
    return Response(body, 500, media_type=JSON, headers=_NO_STORE)
