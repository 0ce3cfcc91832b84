"""The log of addends: tensors whose whole is the sum over ranks. Append-only and synced like the other logs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sonde.schema.addends import Addends, encode_addends
from sonde.schema.layout import addends_folder
from sonde.write.durable import make_folder
from sonde.write.stats.log import Log, next_log_path

_MAX_LOG_BYTES: Final = 256 << 20
"""A log of this size is followed by another one."""


class AddendLog:
    """Used in the writer thread only. The first record creates the folder: most runs have none."""

    def __init__(self, run: Path) -> None:
        self._folder = addends_folder(run)
        self._log: Log | None = None
        self._waiting: list[bytes] = []
        self._next = 0

    def add(self, record: Addends, attempt: int) -> None:
        """Hold a record for the next `flush`."""
        self._waiting.append(encode_addends(self._next, record, attempt))
        self._next += 1

    def flush(self) -> None:
        """Write and sync waiting records. After an error they still wait, and go to another file."""
        if not self._waiting:
            return
        log = self._trusted_log()
        log.append(b"".join(self._waiting))
        log.sync()
        self._waiting.clear()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _trusted_log(self) -> Log:
        if self._log is not None and (not self._log.is_trusted or self._log.size > _MAX_LOG_BYTES):
            self.close()
            self._log = None
        if self._log is None:
            make_folder(self._folder)
            self._log = Log(next_log_path(self._folder))
        return self._log
