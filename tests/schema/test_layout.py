"""The layout: names of files, and a catalog that SQLite accepts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from sonde.schema.layout import CATALOG_SCHEMA, pyramid_folder, row_text, segment_name, stream_folder


def test_files_stand_where_the_format_says() -> None:
    run = Path("runs/p/r")
    assert stream_folder(run, "stats", 3) == run / "stats" / "rank-0003"
    assert segment_name(12) == "seg-00000012.parquet"
    assert pyramid_folder(run, 2) == run / "pyramid" / "level-2" / "rank-0000"


def test_segments_sort_by_name_in_order_of_number() -> None:
    assert sorted(map(segment_name, [100, 20, 3])) == [segment_name(i) for i in (3, 20, 100)]


def test_the_catalog_can_be_created_twice() -> None:
    with sqlite3.connect(":memory:") as catalog:
        catalog.executescript(CATALOG_SCHEMA)
        catalog.executescript(CATALOG_SCHEMA)
        tables = {row[0] for row in catalog.execute("select name from sqlite_master where type = 'table'")}
    assert {"sites", "scalar_names", "segments", "events", "system_metrics"} <= tables


@pytest.mark.parametrize("other", [("1", "23"), ("12", ""), ("12", "3", "")])
def test_the_text_a_checksum_is_taken_over_tells_columns_apart(other: tuple[str, ...]) -> None:
    assert row_text("12", "3") != row_text(*other)
    assert row_text("\ud800")  # names may hold anything
