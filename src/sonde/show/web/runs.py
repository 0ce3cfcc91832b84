"""The table of runs by generated ids: a client never names a path. Folders are only read and never trusted."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sonde.errors import SondeError
from sonde.run import Manifest, Run, read_head, run_folders
from sonde.schema.layout import EXIT_CODE_FILE, RUN_FILE
from sonde.show.trash import Trashed, list_trash
from sonde.show.web.query import BadRequestError, NotFoundError

SCAN_EVERY_S: Final = 1.0
_MAX_IDLE: Final = 3


@dataclass(frozen=True, slots=True)
class Head:
    """The contents of run.json, and the true status."""

    manifest: Manifest | None
    status: str
    """A RunStatus, or "broken"."""
    reason: str
    is_lost: bool = False
    """Whether the process disappeared without a final status."""

    @property
    def step(self) -> int:
        return -1 if self.manifest is None else self.manifest.heartbeat.step


@dataclass(slots=True)
class Entry:
    """A run folder. `open` lends a current `Run` for use by one thread; several can be lent at once."""

    id: str
    path: Path
    home: Path
    """The folder of runs that contains it."""
    damage: dict[str, str] = field(default_factory=dict)
    """Damage found by any reader, for the warnings of all."""
    _idle: list[Run] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _head: tuple[object, Head] | None = None

    @contextmanager
    def open(self) -> Iterator[Run]:
        """Lend a run. Raises RunError if the folder cannot be read."""
        with self._lock:
            run = self._idle.pop() if self._idle else None
        if run is None:
            run = Run(self.path, damage=self.damage)
        try:
            with run.hold():
                yield run
        except (SondeError, BadRequestError):  # a regular reply
            self._take_back(run)
            raise
        # After any other exception the state of the reader is unknown, so it is not lent again.
        self._take_back(run)

    def _take_back(self, run: Run) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(run)

    def head(self) -> Head:
        """Read run.json again only if it changed; whether the run is still being written is always checked."""
        signature = signature_of(self.path / RUN_FILE), signature_of(self.path / EXIT_CODE_FILE)
        known = self._head
        if known is not None and known[0] == signature and known[1].status != "running":
            return known[1]
        head = _read_head(self.path)
        self._head = signature, head
        return head


def _read_head(path: Path) -> Head:
    try:
        manifest, found = read_head(path)
    except (SondeError, OSError) as error:
        return Head(None, "broken", str(error))
    return Head(manifest, found.status, found.reason, found.is_lost)


def signature_of(path: Path) -> object:
    """A value that changes when the file does; None if there is no file."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def run_key(path: Path) -> str:
    """The id of a run folder: the same after a restart, so that URLs can be bookmarked."""
    return hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:16]


class RunTable:
    """Runs in the given places, each of which is a run or a folder of runs."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = [place.resolve() for place in places]
        self._entries: dict[str, Entry] = {}
        self._scanned = -SCAN_EVERY_S
        self._lock = threading.Lock()

    def entries(self, *, fresh: bool = False) -> dict[str, Entry]:
        """All runs by id; folders are scanned about once a second."""
        with self._lock:
            if fresh or time.monotonic() - self._scanned >= SCAN_EVERY_S:
                self._scan()
            return dict(self._entries)

    def get(self, id: str) -> Entry:
        found = self.entries().get(id)
        if found is None:
            raise NotFoundError("run not found: it was deleted, or it is in a folder that was not passed to sonde ui")
        return found

    def trash(self) -> dict[str, Trashed]:
        """Deleted runs by their former id."""
        return {run_key(one.origin): one for place in self._folders() for one in list_trash(place)}

    def _folders(self) -> list[Path]:
        return [place for place in self.places if not (place / RUN_FILE).is_file()]

    def _scan(self) -> None:
        found: dict[str, Entry] = {}
        for place in self.places:
            single = (place / RUN_FILE).is_file()
            for path in [place] if single else run_folders(place):
                id = run_key(path)
                found[id] = self._entries.get(id) or Entry(id, path, place.parent if single else place)
        self._entries = found
        self._scanned = time.monotonic()
