"""Stats that need two sites of the same step, such as the update-to-weight ratio: which sites, and the formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.schema.names import Kind
from sonde.schema.sketch import GRAD_MOMENT, GRAD_UPDATE, SUMSQ, Array


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
