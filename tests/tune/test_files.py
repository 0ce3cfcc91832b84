"""Tables are read as tables, and what cannot be trained on is refused with the place where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sonde.errors import UsageError
from sonde.tune.train.files import read_texts

ROWS = [{"text": "one, two", "label": "1"}, {"text": "three", "label": "0"}]


def write(name: str, content: str | bytes) -> Path:
    path = Path(name)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,label\n"one, two",1\nthree,0\n'),
        ("bom.CSV", '\ufefftext,label\r\n"one, two",1\r\nthree,0\r\n'),
        ("a.tsv", "text\tlabel\none, two\t1\nthree\t0\n"),
        ("a.json", '\n [{"text": "one, two", "label": "1"}, {"text": "three", "label": "0"}]'),
        ("lines.json", '{"text": "one, two", "label": "1"}\n\n{"text": "three", "label": "0"}\n'),
    ],
)
def test_rows_of_a_table(name, content):
    assert read_texts(write(name, content)) == ROWS


def test_rows_of_parquet():
    pq.write_table(pa.Table.from_pylist(ROWS), "a.parquet")
    assert read_texts(Path("a.parquet")) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", "x", r'texts can be read from \.txt, .* files and from folders saved by datasets; got "a.docx"'),
        ("a.parquet", "no", "a.parquet is not Parquet"),
        ("a.json", "[1, 2", "a.json: not JSON"),
        ("a.json", '[{"text": "a"}, 3]', "a.json, entry 2: expected an object"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8 text"),
        ("a.csv", "text\n" + "x" * 200_000, "a.csv is not a table: field larger"),
    ],
)
def test_what_cannot_be_read_is_named(name, content, message):
    with pytest.raises(UsageError, match=message):
        read_texts(write(name, content))


def test_a_folder_of_something_else_is_named():
    Path("folder").mkdir()
    with pytest.raises(UsageError, match="not written by datasets' save_to_disk"):
        read_texts(Path("folder"))
    with pytest.raises(UsageError, match=r"no file gone.txt"):
        read_texts(Path("gone.txt"))
