"""`sonde ui` before it serves: where it listens, what it prints, what it refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sonde.errors import UsageError
from sonde.show.web import server
from sonde.show.web.server import Address, Dashboard, bind, can_open_browser, host_names, is_loopback, opened_browser


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else has."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_only_this_machine_is_let_in() -> None:
    dashboard = Dashboard([Path("runs")], Address(port=0))
    with dashboard.socket:
        assert dashboard.socket.getsockname()[0] == "127.0.0.1"
        assert dashboard.url == f"http://127.0.0.1:{dashboard.port}/#token={dashboard.access.token}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_other_machines_need_the_word_for_it(host: str) -> None:
    with pytest.raises(UsageError, match=r"unencrypted.*ssh -N -L .*--expose"):
        Address(host=host)
    assert Address(host=host, expose=True).host == host


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True), ("0.0.0.0", False)],
)
def test_loopback_is_recognised_by_the_address(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_port_that_is_taken_is_named_with_one_that_is_free(taken: int) -> None:
    with pytest.raises(UsageError, match=rf"port {taken} is in use.*Set port= to \d+, which is free"):
        bind(Address(port=taken))


def test_without_a_port_the_next_free_one_is_taken(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEFAULT_PORT", taken)
    with bind(Address()) as found:
        assert found.getsockname()[1] > taken


def test_nonsense_ports_are_refused() -> None:
    with pytest.raises(UsageError, match="invalid port"):
        Address(port=70_000)


def test_names_are_this_machines_alone_unless_exposed() -> None:
    assert host_names(Address(names=("Box.lan",))) == ["127.0.0.1", "localhost", "[::1]", "box.lan"]
    assert socket.gethostname().lower() in host_names(Address(host="0.0.0.0", expose=True))


def test_pages_survive_a_restart_and_a_new_token_does_not() -> None:
    tokens = []
    for keep in (True, True, False):
        dashboard = Dashboard([Path("runs")], Address(port=0), keep=keep)
        dashboard.socket.close()
        tokens.append(dashboard.access.token)
    assert tokens[0] == tokens[1] != tokens[2]


def test_the_browser_opens_without_the_token_on_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    with opened_browser("http://127.0.0.1:1/#token=secret"):
        for _ in range(200):
            if opened:
                break
            __import__("time").sleep(0.01)
        (url,) = opened
        page = Path(url.removeprefix("file://"))
        assert "secret" not in url
        assert "#token=secret" in page.read_text()
        assert page.parent.stat().st_mode & 0o077 == 0
    assert not page.exists()


def test_no_screen_no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server.sys, "platform", "linux")
    assert not can_open_browser()


def test_looking_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, sonde.show.web.app, sonde.show.web.serving; from sonde.show.web.answering import Answers; "
        "from sonde.show.web.runs import RunTable;"
        "from pathlib import Path; Answers(RunTable([Path('runs')])).get('/api/runs');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'textual', 'duckdb')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


def test_a_folder_without_runs_is_an_empty_list(open_page: Any, tmp_path: Path) -> None:
    answer = open_page(tmp_path / "not there yet").get("/api/runs")
    assert answer["runs"] == []
    assert answer["places"] == [str(tmp_path / "not there yet")]
