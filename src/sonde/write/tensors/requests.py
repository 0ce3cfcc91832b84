"""Requests of other processes to a run that is being recorded: one small file per request, one per answer.

The command line writes `requests/<id>.json`; the writer thread checks for it at its heartbeat, and the answer becomes
`requests/<id>.answer.json`. The content is validated: anyone who can write to the folder can write one.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sonde.schema.layout import REQUESTS_FOLDER
from sonde.schema.records import to_json
from sonde.write.durable import write_durably

MAX_BYTES: Final = 4096
_NAME: Final = re.compile(r"([0-9a-f]{8,32})\.json")


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    what: str
    content: dict[str, Any]


class Requests:
    """The requests to one run. Those of an earlier session are discarded: whoever asked is gone."""

    def __init__(self, run: Path) -> None:
        self.folder = run / REQUESTS_FOLDER
        self._since = time.time()
        self._given: set[str] = set()

    def poll(self) -> Iterator[Request]:
        """New requests; each is returned once and its file removed."""
        for path in self._files():
            match = _NAME.fullmatch(path.name)
            if match and match[1] not in self._given and path.is_file() and not path.is_symlink():
                request = self._read(path, match[1])
                self._remove(path, match[1])
                if request is not None:
                    yield request

    def _files(self) -> list[Path]:
        try:
            return sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        except OSError:  # another user's folder: no one can ask
            return []

    def _remove(self, path: Path, id: str) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # another user's file: it stays, and is not read again
            self._given.add(id)

    def answer(self, id: str, **content: Any) -> None:
        """Answer a request. A folder that cannot be written to is not an error."""
        with contextlib.suppress(OSError):
            write_durably(self.folder / f"{id}.answer.json", to_json(content).encode(), sync_name=False)

    def _read(self, path: Path, id: str) -> Request | None:
        try:
            if path.stat().st_mtime < self._since - 1.0:
                return None
            with path.open("rb") as file:
                content = json.loads(file.read(MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or not isinstance(content.get("what"), str):
            return None
        return Request(id, content["what"], content)
