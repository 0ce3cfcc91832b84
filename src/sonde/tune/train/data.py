"""Training texts: from a list, a file, a data set, or synthetic; checked before anything is loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sonde.errors import UsageError
from sonde.schema.packages import require
from sonde.tune.train.files import read_texts, train_split

_KNOWN: Final = (("text",), ("prompt", "completion"), ("messages",), ("input_ids",))
_WORDS: Final = tuple("zero one two three four five six seven eight nine ten eleven twelve".split())  # noqa: SIM905


def as_dataset(given: Any, what: str = "the data set") -> Any:
    """A `datasets.Dataset` from a list of texts or rows, from a file or folder, or from a data set.

    Errors are raised here, before a model is loaded and a run starts.
    """
    datasets = require("datasets", "tune", "fine-tuning")
    if isinstance(given, datasets.IterableDataset):
        return given
    if isinstance(given, str | Path):
        return as_dataset(read_texts(Path(given)), str(given))
    if isinstance(given, Mapping):  # the result of load_dataset
        return as_dataset(train_split(given, what), what)
    if not isinstance(given, datasets.Dataset):
        given = datasets.Dataset.from_list([_row(row, number, what) for number, row in enumerate(given, 1)])
    _check(given, what)
    return given


def _row(row: Any, number: int, what: str) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, Mapping):
        raise UsageError(f"{what}, row {number}: expected a string or a mapping, got {type(row).__name__}.")
    return dict(row)


def _check(dataset: Any, what: str) -> None:
    """Check that there are texts, in columns that trainers know, and in every row."""
    if len(dataset) == 0:
        raise UsageError(f"{what} is empty.")
    names = dataset.column_names
    keys = next((keys for keys in _KNOWN if all(key in names for key in keys)), None)
    if keys is None:
        raise UsageError(
            f"{what}: a row needs text, or prompt and completion, or messages, or input_ids; these rows have "
            f"{', '.join(names) or 'nothing'}. Rename the column with the texts to text."
        )
    for key in keys:
        column = dataset.data.column(key)
        if key in ("text", "completion") and not (_is_text(column.type) or column.null_count == len(column)):
            raise UsageError(f"{what}: {key} contains {column.type}, not strings.")
        # Rows that a selection leaves out are counted as well: the rows show whether one is missing.
        missing = (number for number, value in enumerate(dataset[key], 1) if value is None)
        number = next(missing, None) if column.null_count else None
        if number is not None:
            raise UsageError(f"{what}, row {number}: {key} is missing.")


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)  # of messages
    return bool(is_list or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def generate(kind: str, num_samples: int, seed: int = 0) -> list[dict[str, Any]]:
    """Synthetic texts with something to learn in them, the same for the same seed."""
    chance = random.Random(seed)
    make: Callable[[random.Random], str] = {"counting": _counting, "copying": _copying, "sorting": _sorting}[kind]
    return [{"text": make(chance)} for _ in range(num_samples)]


def texts_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Every text in them, for learning a tokenizer."""
    for row in rows:
        for value in row.values():
            if isinstance(value, str):
                yield value
            elif isinstance(value, list):
                yield from (str(part["content"]) for part in value if isinstance(part, Mapping) and "content" in part)


def _counting(chance: random.Random) -> str:
    start, stride = chance.randrange(4), chance.randrange(1, 3)
    return "count " + " ".join(_WORDS[start::stride][: chance.randrange(3, 8)])


def _copying(chance: random.Random) -> str:
    words = [chance.choice(_WORDS) for _ in range(chance.randrange(2, 6))]
    return f"say {' '.join(words)} again {' '.join(words)}"


def _sorting(chance: random.Random) -> str:
    words = chance.sample(_WORDS, chance.randrange(2, 6))
    return f"sort {' '.join(words)} into {' '.join(sorted(words, key=_WORDS.index))}"
