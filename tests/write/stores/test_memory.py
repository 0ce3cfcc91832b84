"""The store in memory passes what every store passes."""

from __future__ import annotations

from pathlib import Path

from sonde.testing.stores import StoreTests
from sonde.write.tensors.store import Store, open_store


class TestMemory(StoreTests):
    survives_reopening = False

    def open(self, run: Path) -> Store:
        return open_store("memory", run)


def test_the_run_folder_is_not_touched(tmp_path: Path) -> None:
    open_store("memory", tmp_path).close()
    assert list(tmp_path.iterdir()) == []
