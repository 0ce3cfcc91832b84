"""Rows of a file or folder with texts: .txt, .jsonl, .json, .csv, .tsv, .parquet, or a data set saved by `datasets`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from sonde.errors import UsageError
from sonde.schema.packages import require

Rows = list[dict[str, Any]]
_MAX_LINE: Final = 16 << 20


def read_texts(path: Path) -> Rows:
    """Its rows, by file type: a table must not be read, and learned, as lines of text."""
    if path.is_dir():
        return _saved_dataset(path)
    if not path.is_file():
        raise UsageError(f"no file {path}.")
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UsageError(
            f'texts can be read from {", ".join(_READERS)} files and from folders saved by datasets; got "{path.name}".'
        )
    try:
        return read(path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}.") from None


def _text_lines(path: Path) -> Rows:
    return [{"text": line} for _, line in _filled(path)]


def _json_lines(path: Path) -> Rows:
    rows = []
    for number, line in _filled(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON ({error}).") from None
        rows.append(_as_row(row, f"{path}, line {number}"))
    return rows


def _json(path: Path) -> Rows:
    """One list of objects; or lines, which many files with this ending contain."""
    with path.open(encoding="utf-8") as file:
        if not file.read(1024).lstrip().startswith("["):
            return _json_lines(path)
        file.seek(0)
        try:
            rows = json.load(file)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: not JSON ({error}).") from None
    return [_as_row(row, f"{path}, entry {number}") for number, row in enumerate(rows, 1)]


def _as_row(row: Any, place: str) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise UsageError(f'{place}: expected an object such as {{"text": "…"}}.')
    return row


def _separated(path: Path) -> Rows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", restval=None))
        except csv.Error as error:
            raise UsageError(f"{path} is not a table: {error}.") from None
    return [{name: value for name, value in row.items() if name is not None} for row in rows]


def _parquet(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: Rows = pq.read_table(path).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path} is not Parquet: {str(error).splitlines()[0]}") from None
    return rows


def _saved_dataset(path: Path) -> Rows:
    """A folder that `Dataset.save_to_disk` wrote; of several splits, `train`."""
    datasets = require("datasets", "tune", "fine-tuning")
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise UsageError(
            f"{path} is a folder that was not written by datasets' save_to_disk. Pass a file, or such a folder."
        )
    found = train_split(datasets.load_from_disk(str(path)), str(path))
    rows: Rows = found.to_list()
    return rows


def train_split(found: Any, what: str) -> Any:
    """The split to train on, if there are several."""
    if not isinstance(found, dict):
        return found
    if "train" not in found:
        raise UsageError(f'{what} has no split "train", only {", ".join(map(str, found))}. Choose one: dataset[…].')
    return found["train"]


def _filled(path: Path) -> list[tuple[int, str]]:
    """Non-empty lines, and their numbers."""
    with path.open(encoding="utf-8") as file:
        lines = [line.strip() for line in iter(lambda: file.readline(_MAX_LINE), "")]
    return [(number, line) for number, line in enumerate(lines, 1) if line]


_READERS: Final[dict[str, Callable[[Path], Rows]]] = {
    ".txt": _text_lines, ".jsonl": _json_lines, ".json": _json, ".csv": _separated, ".tsv": _separated,
    ".parquet": _parquet,
}  # fmt: skip
