"""The way of a snapshot to the store: in order, acknowledged only when the catalog knows it, whatever fails."""

from __future__ import annotations

import sqlite3
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.schema.layout import row_text
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.folder import create_run
from sonde.write.stats.catalog import Catalog
from sonde.write.tensors.requests import Requests
from sonde.write.tensors.snapshots import ChangedError, Outcome, Pending, SnapshotWriter
from sonde.write.tensors.stores.memory import MemoryStore
from sonde.write.writer import Writer, WriterOptions


class Way:
    """A writer, a store, and what was reported about each snapshot."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        self.run = create_run(folder, project="snapshots")
        self.writer = Writer(self.run, WriterOptions(flush_interval_s=0.01, system_interval_s=0))
        self.store = store
        self.outcomes: list[tuple[int, str, list[int]]] = []
        self.released: list[int] = []
        self.errors: list[str] = []
        self.snapshots = SnapshotWriter(lambda: store, "memory", self.writer, self.done, self.failed)

    def failed(self, where: str, error: Exception) -> None:
        self.errors.append(repr(error))

    def done(self, outcome: Outcome) -> None:
        self.outcomes.append((outcome.pending.step, outcome.state, self.rows()))

    def rows(self) -> list[int]:
        connection = sqlite3.connect(f"file:{self.run / 'catalog.sqlite'}?mode=ro", uri=True)
        rows = connection.execute("select * from snapshots order by step").fetchall()
        connection.close()
        assert all(zlib.crc32(row_text(*row[:-1])) == row[-1] for row in rows)
        return [row[1] for row in rows]

    def put(self, step: int, resolve: Any = None) -> None:
        def snapshot() -> Snapshot:
            return Snapshot(step, 1.5, "scheduled", {"param/w": HostTensor.of(np.full(3, step, np.float32))})

        self.snapshots.put(
            Pending(
                step=step,
                time=1.5,
                reason="scheduled",
                nbytes=12,
                resolve=resolve or snapshot,
                release=lambda: self.released.append(step),
            )
        )


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Way]:
    made = Way(tmp_path, MemoryStore())
    yield made
    made.snapshots.close(5)
    made.writer.close("finished")


def test_a_snapshot_is_reported_only_when_store_and_catalog_have_it(way: Way) -> None:
    for step in (3, 5):
        way.put(step)
    assert way.snapshots.flush(20)
    assert way.outcomes == [(3, "taken", [3]), (5, "taken", [3, 5])]
    assert way.store.steps() == [3, 5]
    assert way.released == [3, 5]


def test_one_that_changed_and_one_that_fails_leave_no_row_and_the_next_is_written(way: Way) -> None:
    def changed() -> Snapshot:
        raise ChangedError("param/w was written to")

    def failed() -> Snapshot:
        raise ZeroDivisionError

    way.put(1, changed)
    way.put(2, failed)
    way.put(3)
    assert way.snapshots.flush(20)
    assert [(step, state) for step, state, _ in way.outcomes] == [(1, "changed"), (2, "failed"), (3, "taken")]
    assert way.rows() == [3]
    assert way.released == [1, 2, 3]


def test_a_step_that_the_store_has_is_kept_as_it_is(way: Way) -> None:
    way.put(1)
    way.put(1, lambda: pytest.fail("it should not even be looked at"))
    assert way.snapshots.flush(20)
    assert [(step, state) for step, state, _ in way.outcomes] == [(1, "taken"), (1, "exists")]


def test_what_is_left_at_the_deadline_is_lost_and_reported(tmp_path: Path) -> None:
    gate = threading.Event()
    way = Way(tmp_path, MemoryStore())

    def wait() -> Snapshot:
        gate.wait(20)
        return Snapshot(1, 0.0, "", {})

    way.put(1, wait)
    way.put(2)
    assert not way.snapshots.close(0.05)
    assert way.snapshots.num_open == 2
    gate.set()
    assert way.snapshots.flush(20)
    assert [(step, state) for step, state, _ in way.outcomes] == [(1, "taken"), (2, "lost")]
    way.writer.close("finished")


def test_a_table_from_before_there_were_snapshots_is_recreated(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "catalog.sqlite")
    connection.execute("create table snapshots (id integer primary key, step integer not null)")
    connection.commit()
    connection.close()
    Catalog(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "catalog.sqlite")
    columns = [row[1] for row in connection.execute("pragma table_info(snapshots)")]
    connection.close()
    assert columns == ["id", "step", "time", "store", "details", "crc"]


def test_requests_are_given_once_and_those_of_before_are_thrown_away(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "requests"
    folder.mkdir()
    old = folder / "00000000aa.json"
    old.write_text('{"what": "snapshot"}')
    os.utime(old, (1.0, 1.0))
    for name, text in {
        "00000000bb.json": '{"what": "snapshot"}',
        "00000000cc.json": "[1",
        "00000000dd.json": '["what"]',
        "../escape.json": '{"what": "snapshot"}',
        "00000000ee.answer.json": "{}",
    }.items():
        (folder / name).write_text(text)
    (folder / "00000000ff.json").symlink_to(tmp_path / "escape.json")
    requests = Requests(tmp_path)
    assert [request.id for request in requests.poll()] == ["00000000bb"]
    assert list(requests.poll()) == []
    assert sorted(path.name for path in folder.iterdir()) == ["00000000ee.answer.json", "00000000ff.json"]


def test_a_request_that_cannot_be_removed_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    (folder / "00000000aa.json").write_text('{"what": "snapshot"}')

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    requests = Requests(tmp_path)
    assert [len(list(requests.poll())) for _ in range(3)] == [1, 0, 0]
