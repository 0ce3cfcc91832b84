"""Metrics of a transformer: of each attention layer, of the residual stream and of the feed-forward parts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class AttentionMetrics:
    """Metrics of one attention module."""

    layer: str
    query: float
    """Gradient over weight of the query projection."""
    key: float
    value: float
    head_balance: float = 1.0
    """Smallest over largest gradient of a head's part of the value (or query) projection."""
    entropy: float = math.nan
    """Mean over heads, 1 = attends to everything equally."""
    entropy_by_head: tuple[float, ...] = ()
    logit_max: float = math.nan
    weights: tuple[str, ...] = ()
    """Names of the projection parameters."""

    @property
    def imbalance(self) -> float:
        """Largest over smallest of query, key and value."""
        values = [v for v in (self.query, self.key, self.value) if v > 0]
        return max(values) / min(values) if len(values) == 3 else math.inf if values else math.nan


@dataclass(frozen=True, slots=True)
class TransformerMetrics:
    """Metrics of the whole model."""

    attention: tuple[AttentionMetrics, ...]
    residual: tuple[tuple[str, float], ...] = ()
    """Block, and norm of the gradient at its output, from the first to the last."""
    feed_forward: dict[str, float] = field(default_factory=dict)
    """Block -> gradient/weight of its second feed-forward layer over the first."""
    feed_forward_weights: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Block -> names of those two."""
    carry: dict[str, float] = field(default_factory=dict)
    """Block -> how much of its input it passes on: <out, in> / <in, in>."""

    def as_dict(self) -> dict[str, Any]:
        """Written out: `dataclasses.asdict` copies every number, which takes ten times as long."""
        own = {name: getattr(self, name) for name in TransformerMetrics.__dataclass_fields__}
        attention = tuple(
            {name: getattr(one, name) for name in AttentionMetrics.__dataclass_fields__} for one in self.attention
        )
        copied = {name: dict(value) for name, value in own.items() if isinstance(value, dict)}
        return {**own, **copied, "attention": attention, "residual_ratio": self.residual_ratio}

    @property
    def residual_ratio(self) -> float:
        """Gradient at the first block over that at the last; 1 in a healthy residual stream."""
        values = [norm for _, norm in self.residual if norm > 0]
        return values[0] / values[-1] if len(values) > 1 else math.nan
