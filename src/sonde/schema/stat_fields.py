"""The sketch fields that a stat reads, found by running it once on a row that records each access."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np

from sonde.schema.joined import JOINED
from sonde.schema.sketch import FIELDS, INDEX, NUM_BINS, Array
from sonde.schema.stats import STATS

ALL_FIELDS: Final = frozenset(range(len(FIELDS)))


class _FieldSpy:
    """Stands in for `rows`; every field is one."""

    def __init__(self) -> None:
        self.fields: set[int] = set()
        self.is_complete = True

    def __getitem__(self, key: Any) -> Array:
        if isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis and isinstance(key[1], int):
            self.fields.add(key[1])
            return np.ones(1)
        self.is_complete = False
        raise KeyError(key)


@cache
def fields_of(stat: str) -> frozenset[int]:
    """The fields that a stat needs, from its own site and from its partners alike; all of them if unknown."""
    if stat in INDEX and stat not in STATS:
        return frozenset({INDEX[stat]})
    spy = _FieldSpy()
    rows: Any = spy
    try:
        if stat in STATS:
            STATS[stat].of(rows, np.ones((1, NUM_BINS)))
        else:
            JOINED[stat].of(*[rows] * (1 + len(JOINED[stat].partners)))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return ALL_FIELDS
    return frozenset(spy.fields) if spy.is_complete else ALL_FIELDS
