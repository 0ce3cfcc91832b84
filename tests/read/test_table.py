"""`Table` does what a pyarrow.Table does, is accepted where Arrow data is, and shows itself in a few lines."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sonde.errors import MissingPackageError
from sonde.read.table import Table
from sonde.read.text import table_text


def arrow(num_rows: int = 4) -> pa.Table:
    words = pa.array([f"layers.{i % 2}" for i in range(num_rows)]).dictionary_encode()
    table = pa.table({"step": range(num_rows), "site": words, "value": np.linspace(0, 1, num_rows)})
    return table.replace_schema_metadata({"made": "here"})


def table(num_rows: int = 4) -> Table:
    return Table(arrow(num_rows))


# --------------------------------------------------------------------------------------------------- as a pyarrow.Table


def test_size_and_columns_are_those_of_pyarrow() -> None:
    assert (table().num_rows, table().num_columns, len(table())) == (4, 3, 4)
    assert table().column_names == ["step", "site", "value"]
    assert table().schema.equals(arrow().schema, check_metadata=True)
    assert table().to_pylist() == arrow().to_pylist()


def test_everything_public_of_pyarrow_is_there() -> None:
    names = [name for name in dir(pa.Table) if not name.startswith("_")]
    assert [name for name in names if not hasattr(table(), name)] == []
    assert set(names) <= set(dir(table()))


def test_columns_are_chunked_arrays_by_name_and_number() -> None:
    assert table()["step"].to_pylist() == table()[0].to_pylist() == [0, 1, 2, 3]
    assert isinstance(table()["value"], pa.ChunkedArray)
    assert [column.to_pylist() for column in table()] == [column.to_pylist() for column in arrow()]
    with pytest.raises(KeyError):
        table()["nothing"]
    with pytest.raises(IndexError):
        table()[3]


@pytest.mark.parametrize("rows", [slice(1, 3), slice(None, None, 2), slice(-2, None), slice(9, 12)])
def test_slice_is_a_table_of_these_rows(rows: slice) -> None:
    assert isinstance(table()[rows], Table)
    assert table()[rows] == arrow()[rows]


def test_methods_that_return_a_table_return_one_that_shows_itself() -> None:
    found = table().filter(pc.field("step") > 0).sort_by([("step", "descending")]).select(["step"])
    assert isinstance(found, Table)
    assert found["step"].to_pylist() == [3, 2, 1]


def test_methods_take_one_of_us_for_a_pyarrow_table() -> None:
    other = Table(pa.table({"step": [1, 2], "score": [5.0, 6.0]}))
    assert table().equals(table())
    joined = table().join(other, keys="step", join_type="inner")
    assert sorted(joined["score"].to_pylist()) == [5.0, 6.0]


def test_equal_tables_are_equal_on_either_side() -> None:
    assert table() == table()
    assert table() == arrow()
    assert arrow() == table()
    assert table() != table(3)
    assert table() != arrow().to_pylist()
    with pytest.raises(TypeError, match="unhashable"):
        hash(table())


@pytest.mark.parametrize("again", [lambda t: pickle.loads(pickle.dumps(t)), copy.copy, copy.deepcopy])
def test_copy_is_a_table_with_the_same_rows(again: Any) -> None:
    assert isinstance(again(table()), Table)
    assert again(table()) == table()


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = table().nothing
    with pytest.raises(AttributeError):
        _ = Table.__new__(Table).num_rows


# ------------------------------------------------------------------------------------------------------ other libraries


def test_pyarrow_takes_it_with_types_and_metadata() -> None:
    assert pa.table(table()).equals(arrow(), check_metadata=True)
    assert pa.RecordBatchReader.from_stream(table()).read_all().equals(arrow())
    assert table().arrow.equals(arrow())


def test_duckdb_reads_it_by_its_variable() -> None:
    ours = table()
    assert duckdb.sql("select sum(step) from ours").fetchall() == [(6,)]
    assert ours.num_rows == 4


def test_pandas_takes_it() -> None:
    expected = arrow().to_pandas()
    pd.testing.assert_frame_equal(table().to_pandas(), expected)
    interchanged = pd.api.interchange.from_dataframe(table().select(["step", "value"]), allow_copy=True)
    pd.testing.assert_frame_equal(interchanged, expected[["step", "value"]])


def test_numpy_takes_it() -> None:
    numbers = table().select(["step", "value"])
    assert np.asarray(numbers).tolist() == np.asarray(numbers.arrow).tolist()


def test_polars_takes_it() -> None:
    pl = pytest.importorskip("polars")
    assert table().to_polars().rows() == pl.from_arrow(arrow()).rows()
    assert pl.DataFrame(table()).rows() == table().to_polars().rows()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_missing_package_is_named_with_the_command_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"to_{package}\(\) needs {package}.*pip install .*\[{package}\]"):
        getattr(table(), f"to_{package}")()


# ------------------------------------------------------------------------------------------------------------- as text


def test_short_table_is_shown_whole() -> None:
    assert table_text(arrow(3), 80).splitlines() == [
        "Table: 3 rows × 3 columns",
        "step  site      value",
        "   0  layers.0      0",
        "   1  layers.1    0.5",
        "   2  layers.0      1",
    ]


def test_long_table_is_shown_by_its_ends() -> None:
    lines = repr(table(1200)).splitlines()
    assert lines[0] == "Table: 1,200 rows × 3 columns"
    assert [line.split()[0] for line in lines[2:]] == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "…",
        "1195",
        "1196",
        "1197",
        "1198",
        "1199",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_wide_table_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    wide = Table(pa.table({"name": ["x" * 200], **{f"a long name {i}": [1 / 3] for i in range(30)}}))
    lines = repr(wide).splitlines()
    assert max(map(len, lines)) <= width
    assert "31 columns" in lines[0]
    assert "of them not shown" in lines[0]
    assert "xxx…" in lines[2]


def test_values_are_readable() -> None:
    one = pa.table({"value": [1 / 3], "large": [1.5e20], "time": [0.0], "shape": [[4, 8]], "none": pa.nulls(1)})
    (row,) = table_text(one, 100).splitlines()[2:]
    assert row.split() == ["0.33333", "1.5e+20", "1970-01-01", "00:00:00", "[4,", "8]", "–"]


def test_time_that_is_not_a_date_is_shown_all_the_same() -> None:
    odd = pa.table({"time": [float("nan"), -1e300, 1e300, None]})
    assert len(table_text(odd).splitlines()) == 6


def test_names_cannot_move_the_cursor() -> None:
    hostile = pa.table({"a\x1b[2J": ["\x1b[31mred\nline"]})
    assert "\x1b" not in table_text(hostile)
    assert len(table_text(hostile).splitlines()) == 3


@pytest.mark.parametrize("empty", [pa.table({}), pa.table({"step": pa.array([], pa.int64())})])
def test_empty_table_says_so(empty: pa.Table) -> None:
    assert table_text(empty).startswith("Table: 0 rows")
