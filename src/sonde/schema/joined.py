"""Stats that need two sites of the same step, such as the update-to-weight ratio: which sites, and the formula.

Also the fields of the sketch that a stat reads, found by running it once on a row that records each access.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from sonde.schema.names import Kind
from sonde.schema.sketch import FIELDS, GRAD_MOMENT, GRAD_UPDATE, INDEX, NUM_BINS, SUMSQ, Array
from sonde.schema.stats import STATS

ALL_FIELDS: Final = frozenset(range(len(FIELDS)))


@dataclass(frozen=True, slots=True)
class JoinedStat:
    """`function(own_rows, *partner_rows)`; partners are given as (kind, suffix of the site's name)."""

    name: str
    kind: Kind
    partners: tuple[tuple[Kind, str], ...]
    meaning: str
    function: Callable[..., Array]

    def of(self, own: Array, *partners: Array) -> Array:
        """The value for each row; rows of partners are aligned with `own`."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.function(own, *partners)


def _norm(rows: Array) -> Array:
    """Roots before products: the product of two small sums of squares would underflow."""
    return np.sqrt(rows[..., SUMSQ])


def _ratio(update: Array, param: Array) -> Array:
    return _norm(update) / _norm(param)


def _grad_cosine(update: Array, grad: Array) -> Array:
    return update[..., GRAD_UPDATE] / (_norm(update) * _norm(grad))


def _moment_cosine(update: Array, grad: Array, moment: Array) -> Array:
    return update[..., GRAD_MOMENT] / (_norm(grad) * _norm(moment))


JOINED: Final[dict[str, JoinedStat]] = {
    s.name: s
    for s in (
        JoinedStat("ratio", "update", (("param", ""),), "Norm of the update over norm of the parameter.", _ratio),
        JoinedStat(
            "grad_cosine",
            "update",
            (("grad", ""),),
            "Cosine of gradient and update; -1 is plain descent.",
            _grad_cosine,
        ),
        JoinedStat(
            "moment_cosine",
            "update",
            (("grad", ""), ("optim", ".exp_avg")),
            "Cosine of gradient and first moment.",
            _moment_cosine,
        ),
    )
}


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
