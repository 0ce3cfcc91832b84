"""Parameters of a request: whole numbers within limits and words from a list. Nothing else is taken from a client."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import parse_qsl

from sonde.schema.old_names import current_stat

MAX_QUERY_BYTES: Final = 16_384
MAX_STEP: Final = 1 << 53
_WHOLE: Final = re.compile(r"-?\d{1,16}", re.ASCII)
_ID: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)
_RANGE: Final = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


class BadRequestError(Exception):
    """A request that is answered with 400."""

    status, code = 400, "bad_request"


class NotFoundError(BadRequestError):
    """Something that was asked for is not there."""

    status, code = 404, "not_found"


class ConflictError(BadRequestError):
    """It cannot be done as things are."""

    status, code = 409, "conflict"


class Query:
    """The query string, taken apart. A parameter that was not asked for is refused at `done`."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_QUERY_BYTES:
            raise BadRequestError(f"the query is longer than {MAX_QUERY_BYTES} bytes")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=32)
        except ValueError:
            raise BadRequestError("too many parameters") from None
        self._values = dict(pairs)
        if len(self._values) < len(pairs):
            raise BadRequestError("a parameter is given twice")

    @property
    def values(self) -> Mapping[str, str]:
        return self._values

    def only(self, *names: str) -> Query:
        """Refuse parameters of other names."""
        for name in self._values:
            if name not in names:
                raise BadRequestError(f"unknown parameter {name[:40]!r}; known: {', '.join(names) or 'none'}")
        return self

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from `low` to `high`."""
        text = self._values.get(name)
        if text is None:
            if default is None:
                raise BadRequestError(f"{name} is missing")
            return default
        if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
            raise BadRequestError(f"{name} is a whole number from {low} to {high}")
        return int(text)

    def wholes(self, name: str, limit: int) -> list[int]:
        """Different whole numbers, separated by commas."""
        parts = self._values.get(name, "").split(",")
        if len(parts) > limit:
            raise BadRequestError(f"{name} names {len(parts)} things; at most {limit} at once")
        if not all(_WHOLE.fullmatch(part) for part in parts):
            raise BadRequestError(f"{name} is a list of whole numbers, as in {name}=0,3")
        return list(dict.fromkeys(int(part) for part in parts))

    def word(self, name: str, known: Collection[str]) -> str:
        """One of the known words."""
        word = self._values.get(name, "")
        if word not in known:
            raise NotFoundError(f"no such {name}; known: {', '.join(sorted(known)[:50])}")
        return word

    def stat(self, known: Collection[str]) -> str:
        """The stat that is asked for, by its name or by one that earlier versions had: an address may be that old."""
        if "stat" in self._values:
            self._values["stat"] = current_stat(self._values["stat"])
        return self.word("stat", known)

    def ids(self, name: str, low: int, high: int) -> list[str]:
        """Ids of runs, separated by commas."""
        parts = self._values.get(name, "").split(",")
        if not low <= len(parts) <= high or not all(_ID.fullmatch(part) for part in parts):
            raise BadRequestError(f"{name} is {low} to {high} ids of runs")
        return parts

    def span(self, last_step: int) -> tuple[int, int]:
        """`from` and `to`, both included; the whole run when left out."""
        first = self.whole("from", 0, MAX_STEP, 0)
        last = self.whole("to", 0, MAX_STEP, max(last_step, first))
        if last < first:
            raise BadRequestError("to is before from")
        return first, last

    def range(self, name: str, size: int) -> tuple[int, int]:
        """Positions "first-last", both included, as (first, behind the last); all of `size` when left out."""
        text = self._values.get(name)
        if text is None:
            return 0, size
        match = _RANGE.fullmatch(text)
        if match is None:
            raise BadRequestError(f"{name} is a range of positions, as in {name}=0-499")
        first, last = int(match[1]), int(match[2])
        return min(first, size), max(min(last + 1, size), min(first, size))
