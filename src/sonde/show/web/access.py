"""Access control: a 256-bit token, exchanged for a cookie. Compared in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

_BYTES: Final = 32
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}")


def new_token() -> str:
    return secrets.token_urlsafe(_BYTES)


def token_file() -> Path:
    """The file with this user's token."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sonde" / "ui-token"


def kept_token(path: Path) -> str:
    """The token of the last server, so that open pages survive a restart; a new one if there is none to trust."""
    found = _read_token(path)
    if found is not None:
        return found
    token = new_token()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token)
    except OSError:  # a read-only home: the token lasts as long as the server
        pass
    return token


def _read_token(path: Path) -> str | None:
    """Read the file, if it belongs to this user and no one else can read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        is_ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or not is_ours:
            return None
        text = file.read(100).decode("ascii", "replace")
    return text if _TOKEN.fullmatch(text) else None


class Access:
    """The token and the cookie it is exchanged for.

    The cookie is derived from the token, so that a page that was open before a restart keeps working.
    """

    def __init__(self, token: str | None = None, *, port: int = 0) -> None:
        self.token = token or new_token()
        # Cookies are shared between ports: each server uses its own name, or two would log each other out.
        self.cookie_name = f"sonde_{port}"
        self._session = hmac.new(self.token.encode(), f"session {port}".encode(), hashlib.sha256).hexdigest()

    def __repr__(self) -> str:
        return "Access(…)"

    def is_token(self, given: object) -> bool:
        return isinstance(given, str) and _same(given, self.token)

    def is_allowed(self, cookies: str, authorization: str = "") -> bool:
        """Whether a request has the cookie, or the token as `Authorization: Bearer …` (for scripts)."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        # Parsed by hand: Python's parser gives up at the first malformed cookie of another local application.
        pairs = (part.strip().partition("=") for part in cookies.split(";"))
        return any(name == self.cookie_name and _same(value, self._session) for name, _, value in pairs)

    def set_cookie(self) -> str:
        """The value of Set-Cookie."""
        return f"{self.cookie_name}={self._session}; HttpOnly; SameSite=Strict; Path=/"


def _same(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode("utf-8", "surrogatepass"), b.encode())
