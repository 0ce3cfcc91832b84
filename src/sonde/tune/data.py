"""Texts to train on: from a list, a file, a data set, or made up. Nothing is downloaded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from sonde.errors import MissingPackageError, UsageError

_KNOWN: Final = (("text",), ("prompt", "completion"), ("messages",), ("input_ids",))
_MAX_LINE: Final = 16 << 20
_WORDS: Final = tuple("zero one two three four five six seven eight nine ten eleven twelve".split())  # noqa: SIM905


def as_dataset(given: Any) -> Any:
    """A `datasets.Dataset` of a list of texts or rows, of a .txt or .jsonl file, or of what is one already."""
    datasets = _datasets()
    if isinstance(given, datasets.Dataset | datasets.IterableDataset):
        return given
    if isinstance(given, str | Path):
        return as_dataset(read_texts(Path(given)))
    if isinstance(given, Mapping):
        return {name: as_dataset(each) for name, each in given.items()}
    rows = [{"text": row} if isinstance(row, str) else dict(row) for row in given]
    if not rows:
        raise UsageError("the data set is empty.")
    if not any(all(key in rows[0] for key in keys) for keys in _KNOWN):
        raise UsageError(
            f"a row has text, or prompt and completion, or messages, or input_ids; the first has {', '.join(rows[0])}."
        )
    return datasets.Dataset.from_list(rows)


def read_texts(path: Path) -> list[dict[str, Any]]:
    """Rows of a file: one text per line of a .txt, one JSON object per line of a .jsonl."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line.strip() for line in iter(lambda: file.readline(_MAX_LINE), "")]
    except FileNotFoundError:
        raise UsageError(f"no file {path} with texts.") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8: {error}.") from None
    filled = [(number, line) for number, line in enumerate(lines, 1) if line]
    if path.suffix not in (".jsonl", ".json"):
        return [{"text": line} for _, line in filled]
    rows = []
    for number, line in filled:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON ({error}).") from None
        if not isinstance(row, dict):
            raise UsageError(f'{path}, line {number}: an object such as {{"text": "…"}} was expected.')
        rows.append(row)
    return rows


def generate(kind: str, num_samples: int, seed: int = 0) -> list[dict[str, Any]]:
    """Made-up texts with something to learn in them, the same for the same seed."""
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


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingPackageError("datasets", "tune", "fine-tuning") from None
    return datasets
