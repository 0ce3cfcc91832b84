"""Parameters of a request: integers within limits and words from a list. Nothing else is accepted from a client."""

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
    """An invalid request (400)."""

    status, code = 400, "bad_request"


class NotFoundError(BadRequestError):
    """The requested object does not exist (404)."""

    status, code = 404, "not_found"


class ConflictError(BadRequestError):
    """The request conflicts with the current state (409)."""

    status, code = 409, "conflict"


class Query:
    """The parsed query string. `only` rejects unknown parameters."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_QUERY_BYTES:
            raise BadRequestError(f"the query is longer than {MAX_QUERY_BYTES} bytes")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=32)
        except ValueError:
            raise BadRequestError("too many parameters") from None
        self._values = dict(pairs)
        if len(self._values) < len(pairs):
            raise BadRequestError("a parameter is repeated")

    @property
    def values(self) -> Mapping[str, str]:
        return self._values

    def only(self, *names: str) -> Query:
        """Reject parameters with other names."""
        for name in self._values:
            if name not in names:
                raise BadRequestError(f"unknown parameter {name[:40]!r}; known: {', '.join(names) or 'none'}")
        return self

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from `low` to `high`."""
        text = self._values.get(name)
        if text is None:
            if default is None:
                raise BadRequestError(f"{name} is missing")
            return default
        if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
            raise BadRequestError(f"{name} must be an integer from {low} to {high}")
        return int(text)

    def wholes(self, name: str, limit: int) -> list[int]:
        """Distinct integers, separated by commas."""
        parts = self._values.get(name, "").split(",")
        if len(parts) > limit:
            raise BadRequestError(f"{name} has {len(parts)} values; the maximum is {limit}")
        if not all(_WHOLE.fullmatch(part) for part in parts):
            raise BadRequestError(f"{name} must be a list of integers, e.g. {name}=0,3")
        return list(dict.fromkeys(int(part) for part in parts))

    def word(self, name: str, known: Collection[str]) -> str:
        """One of the known words."""
        word = self._values.get(name, "")
        if word not in known:
            raise NotFoundError(f"unknown {name}; known: {', '.join(sorted(known)[:50])}")
        return word

    def stat(self, known: Collection[str]) -> str:
        """The requested stat, by its current or an earlier name: a bookmarked URL may be old."""
        if "stat" in self._values:
            self._values["stat"] = current_stat(self._values["stat"])
        return self.word("stat", known)

    def ids(self, name: str, low: int, high: int) -> list[str]:
        """Ids of runs, separated by commas."""
        parts = self._values.get(name, "").split(",")
        if not low <= len(parts) <= high or not all(_ID.fullmatch(part) for part in parts):
            raise BadRequestError(f"{name} must be {low} to {high} run ids, separated by commas")
        return parts

    def span(self, last_step: int) -> tuple[int, int]:
        """`from` and `to`, both inclusive; the whole run if omitted."""
        first = self.whole("from", 0, MAX_STEP, 0)
        last = self.whole("to", 0, MAX_STEP, max(last_step, first))
        if last < first:
            raise BadRequestError("`to` must not be less than `from`")
        return first, last

    def range(self, name: str, size: int) -> tuple[int, int]:
        """Positions "first-last", both inclusive, as (first, last + 1); all of `size` if omitted."""
        text = self._values.get(name)
        if text is None:
            return 0, size
        match = _RANGE.fullmatch(text)
        if match is None:
            raise BadRequestError(f"{name} must be a range of positions, e.g. {name}=0-499")
        first, last = int(match[1]), int(match[2])
        return min(first, size), max(min(last + 1, size), min(first, size))
