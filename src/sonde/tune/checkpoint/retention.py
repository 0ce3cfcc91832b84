"""Decides which checkpoints to keep. Pure: a list in, a list out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.errors import UsageError
from sonde.read.run.checkpoints import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Without any rule everything stays; otherwise checkpoints that no rule keeps are deleted. The newest always
    stays."""

    keep_last: int | None = None
    """The newest N."""
    keep_best: int | None = None
    """The best K by `metric`."""
    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large value of the metric is better."""
    keep_every: int | None = None
    """Those whose step is a multiple of M."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_best", "keep_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be at least 1, or None to disable it; got {value!r}.")
        if self.mode not in ("min", "max"):
            raise UsageError(f'mode must be "min" or "max"; got {self.mode!r}.')

    def best(self, found: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Best first; those without the metric, or with NaN, are left out. Of equal ones the older is better."""
        rated = [c for c in found if not math.isnan(c.metrics.get(self.metric, math.nan))]
        sign = 1 if self.mode == "min" else -1
        return sorted(rated, key=lambda c: (sign * c.metrics[self.metric], c.step))

    def surplus(self, found: Sequence[Checkpoint]) -> list[Checkpoint]:
        """The checkpoints that no rule keeps."""
        if not found or (self.keep_last is None and self.keep_best is None and self.keep_every is None):
            return []
        by_step = sorted(found, key=lambda c: c.step)
        kept = {c.id for c in by_step[-(self.keep_last or 1) :]}
        kept |= {c.id for c in self.best(by_step)[: self.keep_best or 0]}
        if self.keep_every is not None:
            kept |= {c.id for c in by_step if c.step % self.keep_every == 0}
        return [c for c in by_step if c.id not in kept]
