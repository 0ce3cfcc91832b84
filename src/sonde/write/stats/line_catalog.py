"""The catalog of a rank other than the first: one signed line of JSON for each commit.

On a file system that several machines share, only one process of a job may have a SQLite file open for writing. A line
that was cut off by a kill fails its checksum, and is left out as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sonde.schema.layout import RANK_CATALOG_FILE
from sonde.schema.records import check_document, sign_document, to_json
from sonde.write.durable import open_file, sync_folder, write_all
from sonde.write.stats.catalog import CatalogRows, Row

_CHECKED = ("sites", "shards", "scalar_names", "segments", "attempts")


class LineCatalog(CatalogRows):
    """Use from one thread only."""

    def __init__(self, run: Path) -> None:
        self.path = run / RANK_CATALOG_FILE
        self._num_commits = 0
        self._rows: dict[str, dict[Any, list[Any]]] = {table: {} for table in _CHECKED}
        self._read()
        self._fd = open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sync_folder(run)

    def next_finding(self) -> int:
        """Rules run on the first rank only."""
        return 1

    def commit(self, rows: Iterable[Row]) -> None:
        """Write all of the rows or none; they are durable when this returns. A commit that failed may be repeated: its
        number is the same, so that readers count it once."""
        content = {"commit": self._num_commits, "rows": [[table, *values] for table, values in rows]}
        # A commit that failed may have left half a line.
        write_all(self._fd, f"\n{sign_document(to_json(content))}".encode())
        os.fdatasync(self._fd)
        self._num_commits += 1

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _read(self) -> None:
        """Read the commits of an earlier process of this rank."""
        if not self.path.exists():
            return
        for line in self.path.read_bytes().splitlines(keepends=True):
            if b'"crc32"' not in line or not check_document(line):
                continue
            try:
                content = json.loads(line)
            except ValueError:  # cut off within its signature
                continue
            self._num_commits = max(self._num_commits, int(content["commit"]) + 1)
            for table, *values in content["rows"]:
                if table in self._rows:
                    self._rows[table][values[0]] = values

    def _stored(self, table: str) -> list[list[Any]]:
        return [self._rows[table][id] for id in sorted(self._rows[table])]
