"""A real server, asked by hand: malformed requests, tricks with headers, connections that never finish."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from sonde.show.web.connections import REQUEST_S
from sonde.show.web.server import Address, Dashboard
from sonde.show.web.serving import QuickServer, configured

SECRET = "secret-of-the-disk"


@dataclass
class Raw:
    """Bytes to a server and back."""

    dashboard: Dashboard

    @property
    def token(self) -> str:
        return self.dashboard.access.token

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.dashboard.port), timeout=10)

    def send(self, request: str) -> str:
        with self.connect() as connection:
            text = request.replace("PORT", str(self.dashboard.port)).replace("\n", "\r\n")
            connection.sendall(text.encode("latin-1"))
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        return answer.decode("latin-1")

    def status(self, request: str) -> int:
        answer = self.send(request)
        assert SECRET not in answer
        return int(answer.split()[1]) if answer else 0


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory, until: Callable[..., None]) -> Iterator[Raw]:
    root = tmp_path_factory.mktemp("raw")
    (root / "secret.txt").write_text(SECRET)
    (root / "runs").mkdir()
    dashboard = Dashboard([root / "runs"], Address(port=0), keep=False)
    server = QuickServer(configured(dashboard.app), dashboard.app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [dashboard.socket]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield Raw(dashboard)
    server.should_exit = True
    thread.join(10.0)
    assert not thread.is_alive()
    dashboard.socket.close()


OK = "Host: 127.0.0.1:PORT\nConnection: close\n"


@pytest.mark.parametrize(
    ("request_line", "headers", "allowed"),
    [
        ("GET / HTTP/1.1", OK, {200}),
        ("GET /api/runs HTTP/1.1", OK, {401}),
        ("GET / HTTP/1.1", "Connection: close\n", {400}),
        ("GET / HTTP/1.1", f"Host: evil.example\n{OK}", {400, 421}),
        ("GET http://evil.example/api/runs HTTP/1.1", OK, {400, 401, 404, 421}),
        ("GET //evil.example/api/runs HTTP/1.1", OK, {200, 401, 404}),
        ("GET /static/../../../../secret.txt HTTP/1.1", OK, {404}),
        ("GET /static/..\\..\\secret.txt HTTP/1.1", OK, {404}),
        ("GET /%2e%2e/%2e%2e/secret.txt HTTP/1.1", OK, {404}),
        ("GET file:///etc/passwd HTTP/1.1", OK, {400, 404}),
        ("TRACE / HTTP/1.1", OK, {405}),
        ("PUT /api/runs HTTP/1.1", OK, {405}),
        ("NONSENSE", "", {400}),
        ("GET / HTTP/1.1", f"{OK}X: {'x' * 100_000}\n", {400, 431}),
        ("GET /" + "x" * 100_000 + " HTTP/1.1", OK, {400, 414, 431}),
        ("POST /api/login HTTP/1.1", f"{OK}Origin: http://127.0.0.1:PORT\nContent-Length: -1\n", {400}),
        ("GET /api/events HTTP/1.1", f"{OK}Upgrade: websocket\nConnection: Upgrade\n", {400, 401, 403}),
    ],
)
def test_tricks_are_answered_with_a_refusal(raw: Raw, request_line: str, headers: str, allowed: set[int]) -> None:
    assert raw.status(f"{request_line}\n{headers}\n") in allowed


def test_a_body_that_says_two_lengths_is_refused(raw: Raw) -> None:
    headers = f"{OK}Origin: http://127.0.0.1:PORT\nContent-Length: 4\nTransfer-Encoding: chunked\n"
    status = raw.status(f"POST /api/login HTTP/1.1\n{headers}\n0\n\nGET /api/runs HTTP/1.1\n{OK}\n")
    assert status in (400, 401)


def test_with_the_token_the_same_question_is_answered(raw: Raw) -> None:
    assert raw.status(f"GET /api/runs HTTP/1.1\n{OK}Authorization: Bearer {raw.token}\n\n") == 200


def test_connections_that_never_finish_do_not_keep_others_out(raw: Raw) -> None:
    idle = [raw.connect() for _ in range(150)]
    try:
        for connection in idle:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert raw.status(f"GET / HTTP/1.1\n{OK}\n") == 200
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize(
    "first", [b"", b"GET / HTTP/1.1\r\nHost: ", b"POST /api/runs HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
def test_400_connections_that_never_send_a_request_do_not_take_the_place_of_others(raw: Raw, first: bytes) -> None:
    idle = []
    try:
        for _ in range(400):
            idle.append(raw.connect())
            idle[-1].sendall(first)
        assert raw.status(f"GET / HTTP/1.1\n{OK}\n") == 200
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.slow
def test_a_connection_without_a_whole_request_is_closed_in_time(raw: Raw) -> None:
    kept = raw.connect()
    kept.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{raw.dashboard.port}\r\n\r\n".encode())
    assert kept.recv(65536).startswith(b"HTTP/1.1 200")
    slow = [raw.connect() for _ in range(3)]
    slow[1].sendall(b"GET / HT")
    kept.sendall(b"GET / HT")  # a second request, begun and never finished
    for connection in (*slow, kept):
        connection.settimeout(3 * REQUEST_S)
        while connection.recv(65536):
            pass
        connection.close()


def test_a_slow_request_does_not_delay_others(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    get = raw.dashboard.answers.get

    def slow(path: str) -> Any:
        if path == "/api/compare?ids=slow":
            begun.set()
            may_end.wait(20)
        return get(path)

    monkeypatch.setattr(raw.dashboard.answers, "get", slow)
    allowed = f"{OK}Authorization: Bearer {raw.token}\n"
    statuses: list[int] = []
    asked = threading.Thread(
        target=lambda: statuses.append(raw.status(f"GET /api/compare?ids=slow HTTP/1.1\n{allowed}\n")), daemon=True
    )
    asked.start()
    assert begun.wait(10)
    assert raw.status(f"GET /api/runs HTTP/1.1\n{allowed}\n") == 200
    assert statuses == []
    may_end.set()
    asked.join(10)
    assert statuses == [400]


def test_nothing_is_said_about_what_serves(raw: Raw) -> None:
    head = raw.send(f"GET / HTTP/1.1\n{OK}\n").partition("\r\n\r\n")[0].lower()
    assert "server:" not in head
    assert isinstance(configured(raw.dashboard.app), uvicorn.Config)
    assert not configured(raw.dashboard.app).access_log


def test_the_dashboard_finds_no_file_by_path(raw: Raw, tmp_path: Path) -> None:
    for path in (str(tmp_path), "/etc/passwd", "/proc/self/environ"):
        assert raw.status(f"GET {path} HTTP/1.1\n{OK}\n") in (200, 404)  # 200 is the application's own page
        assert "root:" not in raw.send(f"GET {path} HTTP/1.1\n{OK}\n")
