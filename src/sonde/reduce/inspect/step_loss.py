"""The loss of a step, from the numbers that its backward passes started with. Pure arithmetic, on the writer thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_NEAR: Final = 1e-3
"""Tolerance for the weights of the micro-batches to add up to one: they are rounded, in low precision coarsely."""
_PARTLY: Final = 0.5
"""Hugging Face's trainer also divides by labels that are shifted out of the sequence: the weights add up to less."""
_SAME: Final = 1e-5


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A number that gradients were computed from, and its origin."""

    value: float
    factors: tuple[float, ...] = ()
    """The factors that turned the loss into this number, the last multiplication first."""
    num_terms: float = math.nan
    """The number of terms, for a loss function that sums them."""


class StepLoss:
    """Knows how a program scales its losses, from earlier steps."""

    def __init__(self) -> None:
        self._share: float | None = None
        """The factor of each micro-batch in a whole step, once it is known."""
        self.factor = 1.0
        """The remaining factor between the loss and the result of the loss function. NaN: it varies."""
        self.is_per_term = False
        """Whether sums over terms are divided by the number of terms in the step."""
        self._is_known = False

    def of_step(self, parts: Sequence[MicroBatch], scale: float | None = None) -> float:
        """The mean over micro-batches, each with its weight in training.

        >>> StepLoss().of_step([MicroBatch(0.5, (0.5,)), MicroBatch(1.0, (0.5,))])  # losses 1 and 2, each halved
        1.5
        >>> StepLoss().of_step([MicroBatch(1.0), MicroBatch(2.0)])  # the same, not divided
        1.5
        """
        parts = [_unscaled(part, scale) for part in parts]
        total, num = sum(part.value for part in parts), len(parts)
        self.is_per_term = False
        terms = [math.prod(part.factors) * part.num_terms for part in parts]
        if all(map(_is_whole, terms)) or _is_whole(sum(terms)):
            self.is_per_term = True
            self._keep(parts, None)
            return total / num if _is_whole(terms[0]) else total
        for depth in range(1, min(len(part.factors) for part in parts) + 1):
            shares = [math.prod(part.factors[:depth]) for part in parts]
            if num > 1 and abs(sum(shares) - 1) < _NEAR:
                self._share = shares[0] if _are_same(shares) else self._share
                self._keep(parts, depth)
                return total
            if self._share is not None and _are_same([*shares, self._share]):  # the last step of an epoch has fewer
                self._keep(parts, depth)
                return total / sum(shares)
        self._keep(parts, 0)
        return total / num

    def _keep(self, parts: Sequence[MicroBatch], depth: int | None) -> None:
        rest = [1.0 if depth is None else math.prod(part.factors[depth:]) for part in parts]
        is_same = _are_same(rest) and (not self._is_known or _are_same([rest[0], self.factor]))
        self.factor, self._is_known = rest[0] if is_same else math.nan, True


def _unscaled(part: MicroBatch, scale: float | None) -> MicroBatch:
    """Without the factor of a GradScaler."""
    if scale is None or not part.factors or part.factors[0] != scale:
        return part
    return MicroBatch(part.value / scale, part.factors[1:], part.num_terms)


def _is_whole(weight: float) -> bool:
    return _PARTLY < weight < 1 + _NEAR


def _are_same(numbers: Sequence[float]) -> bool:
    return all(abs(number - numbers[0]) <= _SAME * abs(numbers[0]) for number in numbers)
