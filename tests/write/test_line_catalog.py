"""The catalog of a rank other than the first: lines that survive a kill, read like the tables of SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest

from sonde.errors import CorruptError
from sonde.read.run.catalog import read_catalog, read_rows
from sonde.schema.layout import RANK_CATALOG_FILE
from sonde.schema.records import Event, Shard, Site
from sonde.write.stats.catalog import event_row, shard_row, site_row
from sonde.write.stats.line_catalog import LineCatalog

SITE = Site(kind="grad", name="0.weight", shape=(4, 2), dtype="float32")


def filled(run: Path) -> LineCatalog:
    catalog = LineCatalog(run)
    catalog.commit([site_row(0, SITE), shard_row(0, Shard(part=1, parts=2))])
    catalog.commit([event_row(Event(type="gap", message="m", step=3, time=1.0), 0)])
    return catalog


def test_rows_are_read_back_by_the_writer_and_by_a_reader(tmp_path: Path) -> None:
    filled(tmp_path).close()
    again = LineCatalog(tmp_path)
    assert (again.sites(), again.shards()) == ({0: SITE}, {0: Shard(part=1, parts=2)})
    found = read_catalog(tmp_path, is_live=False)
    assert (found.sites, found.shards, found.problems) == ({0: SITE}, {0: Shard(part=1, parts=2)}, ())
    assert [row[2:5] for row in read_rows(tmp_path, "events", is_live=False)] == [(3, "gap", "info")]
    again.close()


def test_a_later_row_replaces_an_earlier_one(tmp_path: Path) -> None:
    catalog = filled(tmp_path)
    catalog.commit([shard_row(0, Shard(part=3, parts=4))])
    assert read_catalog(tmp_path, is_live=False).shards == {0: Shard(part=3, parts=4)}
    catalog.close()


@pytest.mark.parametrize("num_bytes", [2, 40])
def test_a_line_that_was_cut_off_is_left_out_and_the_next_process_continues(tmp_path: Path, num_bytes: int) -> None:
    filled(tmp_path).close()
    path = tmp_path / RANK_CATALOG_FILE
    path.write_bytes(path.read_bytes()[:-num_bytes])
    assert read_rows(tmp_path, "events", is_live=False) == []
    catalog = LineCatalog(tmp_path)
    catalog.commit([event_row(Event(type="gap", message="m", step=4, time=1.0), 0)])
    catalog.close()
    assert [row[2] for row in read_rows(tmp_path, "events", is_live=False)] == [4]
    assert read_catalog(tmp_path, is_live=False).sites == {0: SITE}


def test_a_repeated_commit_counts_once(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = tmp_path / RANK_CATALOG_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[-1]]))
    assert len(read_rows(tmp_path, "events", is_live=False)) == 1


def test_a_flipped_bit_hides_its_line_only(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = tmp_path / RANK_CATALOG_FILE
    data = bytearray(path.read_bytes())
    data[data.index(b"gap")] ^= 1
    path.write_bytes(bytes(data))
    assert read_rows(tmp_path, "events", is_live=False) == []
    assert read_catalog(tmp_path, is_live=False).sites == {0: SITE}


def test_a_row_that_contradicts_its_checksum_ends_a_resume(tmp_path: Path) -> None:
    catalog = LineCatalog(tmp_path)
    table, values = site_row(0, SITE)
    catalog.commit([(table, (*values[:-1], 7))])
    catalog.close()
    with pytest.raises(CorruptError, match="row 0 of table sites"):
        LineCatalog(tmp_path).sites()
    assert "1 of 1 rows of sites is damaged" in read_catalog(tmp_path, is_live=False).problems[0]
