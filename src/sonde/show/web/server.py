"""The server behind `sonde ui`: binds a socket, runs uvicorn on it, and opens a browser."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sonde.errors import UsageError
from sonde.show.web.access import Access, kept_token, new_token, token_file

DEFAULT_PORT: Final = 7007
LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")
_NUM_TRIES: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address to listen on, and the host names to accept."""

    host: str = LOOPBACK
    port: int | None = None
    """None: the default port, or the next free one. 0: any free port."""
    expose: bool = False
    """Whether the user explicitly allowed access from other machines."""
    names: tuple[str, ...] = ()
    """Additional host names of the server."""

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.expose:
            raise UsageError(
                f"--host {self.host} lets any machine that can reach this one request your runs; only the token in the "
                "URL protects them, and it is sent unencrypted. Prefer the default host and an SSH tunnel:  "
                f"{tunnel_line(self.port or DEFAULT_PORT)}  To allow it anyway, add --expose."
            )
        if self.port is not None and not 0 <= self.port <= 65535:
            raise UsageError(f"invalid port {self.port}: use 1-65535, or 0 for any free port.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def tunnel_line(port: int) -> str:
    """The command to run on the machine with the browser."""
    return f"ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}"


def bind(address: Address) -> socket.socket:
    """Bind a listening socket. If a requested port is in use, the error suggests a free one."""
    wanted = address.port
    candidates: Sequence[int] = [wanted] if wanted is not None else range(DEFAULT_PORT, DEFAULT_PORT + _NUM_TRIES)
    for port in candidates:
        found = _try_bind(address.host, port)
        if found is not None:
            return found
    if wanted is None:
        raise UsageError(
            f"ports {DEFAULT_PORT} to {DEFAULT_PORT + _NUM_TRIES - 1} are all in use. Set port= to 0 for any free port."
        )
    free = next((port for port in range(wanted + 1, wanted + 1 + _NUM_TRIES) if _is_free(address.host, port)), 0)
    raise UsageError(f"port {wanted} is in use, perhaps by another dashboard. Set port= to {free}, which is free.")


def _try_bind(host: str, port: int) -> socket.socket | None:
    """Bind the port; None if it is in use."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except PermissionError as error:
        listening.close()
        raise UsageError(f"no permission to open port {port} ({error.strerror}). Use a port above 1023.") from error
    except OSError as error:
        listening.close()
        if isinstance(error, socket.gaierror) or error.errno == 99:
            raise UsageError(f"--host {host} is not an address of this machine ({error}).") from error
        return None
    except OverflowError:
        listening.close()
        return None
    return listening


def _is_free(host: str, port: int) -> bool:
    if port > 65535:
        return False
    found = _try_bind(host, port)
    if found is not None:
        found.close()
    return found is not None


def host_names(address: Address) -> list[str]:
    """The accepted values of the Host header; any other value may be a DNS-rebinding attack."""
    names = [*_LOOPBACK_NAMES, *address.names]
    if not is_loopback(address.host):
        names += [socket.gethostname(), socket.getfqdn(), *_own_addresses()]
        names.append(f"[{address.host}]" if ":" in address.host else address.host)
    return [name.lower() for name in names]


def _own_addresses() -> list[str]:
    import psutil

    found = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    return [f"[{one}]" if ":" in one else one for one in found if one.count(".") == 3 or "::" in one]


class Dashboard:
    """A server that is bound but not yet running: its URL is known before it accepts requests."""

    def __init__(self, places: Sequence[Path], address: Address, *, read_only: bool = False, keep: bool = True) -> None:
        from sonde.show.web.answering import Answers
        from sonde.show.web.app import make_app
        from sonde.show.web.runs import RunTable
        from sonde.show.web.serving import make_server

        self.address = address
        self.socket = bind(address)
        self.port = int(self.socket.getsockname()[1])
        self.access = Access(kept_token(token_file()) if keep else new_token(), port=self.port)
        self._runs = RunTable(places)
        self.answers = Answers(self._runs, can_delete=not read_only)
        self.app = make_app(self.answers, self.access, host_names(address))
        self._server = make_server(self.app)

    @property
    def has_runs(self) -> bool:
        """Whether there is a run to show."""
        return bool(self._runs.entries())

    @property
    def origin(self) -> str:
        host = self.address.host if self.address.host not in ("0.0.0.0", "::") else socket.gethostname()  # noqa: S104
        host = LOOPBACK if is_loopback(host) and ":" not in host else host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL with the token in its fragment, which browsers do not send."""
        return f"{self.origin}/#token={self.access.token}"

    def serve(self) -> None:
        """Serve until interrupted or stopped."""
        try:
            self._server.run(sockets=[self.socket])
        except KeyboardInterrupt:  # uvicorn shuts down cleanly and then passes the signal on
            pass
        finally:
            self.socket.close()

    def stop(self) -> None:
        """Stop serving, from another thread."""
        self._server.should_exit = True


def can_open_browser() -> bool:
    """Whether there is a graphical browser: a text browser would take over the terminal."""
    if os.environ.get("BROWSER") or sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextmanager
def opened_browser(url: str) -> Iterator[None]:
    """Open the page without putting the token on a command line, where other users could read it."""
    with tempfile.TemporaryDirectory(prefix="sonde-") as folder:  # made with mode 0700
        page = Path(folder) / "open.html"
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n', encoding="utf-8")
        thread = threading.Thread(target=_open, args=(page.as_uri(),), name="sonde-browser", daemon=True)
        thread.start()
        yield


def _open(url: str) -> None:
    try:
        webbrowser.open(url)
    except (webbrowser.Error, OSError):  # the URL is in the terminal
        return
