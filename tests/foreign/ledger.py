"""What a training with another compiler than torch's has done, as arrays: the part of an oracle that `compare` reads.

A compiler adds up in float32 and in its own order, and computes a gradient with other roundings than the same
formula has without it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from tally import EXACT, Expected, Tally

ROUNDING = 2.0**-19


@dataclasses.dataclass(frozen=True)
class Compiled(Tally):
    """A tally to be compared with what a compiler summed up."""

    rounding: float = ROUNDING

    @classmethod
    def of_array(cls, array: Any, rounding: float = ROUNDING) -> Compiled:
        return cls(**dataclasses.asdict(Tally.of(torch.from_numpy(np.array(array)))), rounding=rounding)

    def stats(self, *, element: float = EXACT) -> dict[str, Expected]:
        found = super().stats(element=max(element, self.rounding))
        largest = max(abs(self.min), abs(self.max))
        extremes = {name: Expected(found[name].value, 2 * self.rounding * largest) for name in ("min", "max")}
        return found | extremes


class Ledger:
    """`step` is the one that is being made."""

    def __init__(self) -> None:
        self.tallies: dict[Any, Tally] = {}
        self.counted: set[Any] = set()
        self.more: dict[Any, dict[str, Expected]] = {}
        self.scalars: dict[tuple[str, int], Expected] = {}
        self.step = -1

    def measures(self, step: int) -> bool:
        return True

    def add(self, kind: str, name: str, value: Any) -> None:
        self.tallies[kind, name, self.step] = Compiled.of_array(value)

    def gradient(self, name: str, used: Any, raw: Any) -> None:
        """As the optimizer used it, and before it was clipped."""
        self.add("grad", name, used)
        before = float(np.linalg.norm(raw))
        factor = float(np.linalg.norm(used)) / before if before else 1.0
        self.more["grad", name, self.step] = {
            "norm_preclip": Expected(before, 1e-5 * before),
            "clip_factor": Expected(factor, 1e-5 * factor),
        }

    def update(self, name: str, before: Any, after: Any, *, is_sum: bool = False, moved: Any = None) -> None:
        """`is_sum`: what was recorded is what was to be added, and the sum is rounded."""
        if moved is None:
            moved = np.asarray(after, np.float64) - np.asarray(before, np.float64)
        size, length = np.linalg.norm(before), np.linalg.norm(moved)
        rounding = ROUNDING + (2.0**-23 * size / length if is_sum and length else 0.0)
        self.tallies["update", name, self.step] = Compiled.of_array(moved, rounding)
        ratio = float(length / size) if size else np.inf if length else np.nan
        self.more["update", name, self.step] = {"ratio": Expected(ratio, 2 * rounding * ratio)}
