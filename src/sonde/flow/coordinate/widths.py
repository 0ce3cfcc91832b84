"""The coordinate check over widths: trains models of several widths for a few steps, and finds what grows with the
width."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from sonde.errors import NotAModelError, UsageError
from sonde.flow.batch import LossFunction, forward
from sonde.flow.coordinate.check import Coordinate, refined_coordinate_check
from sonde.show.flow.coordinate import CoordinateReport, Trend, Verdict

FLAT: Final = 0.15
"""A slope of the logarithms smaller than this is not a trend."""


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    *,
    batches: Callable[[int], Iterator[tuple[Any, Any]]] | tuple[Any, Any],
    loss_fn: LossFunction | None,
    make_optimizer: Callable[[nn.Module, int], torch.optim.Optimizer] | None = None,
    steps: int = 4,
    seeds: int = 3,
    parts: Sequence[str] = ("effective", "propagating"),
) -> CoordinateReport:
    """Train models of several widths for a few steps, and find what grows with the width.

    `make_model(width)`; `batches` is a batch (x, y), or a function of the seed that returns an iterator of batches;
    `make_optimizer(model, width)` is Adam with lr 1e-3 by default.
    """
    if len(set(widths)) < 2:
        raise UsageError(f"a trend needs at least two widths; got {list(widths)}.")
    rows: dict[tuple[str, str], list[tuple[int, float]]] = {}
    with torch.random.fork_rng():
        for seed in range(seeds):
            for width in widths:
                for coordinate in _trained(make_model, width, batches, loss_fn, make_optimizer, steps, seed):
                    for part in parts:
                        rows.setdefault((coordinate.name, part), []).append((width, getattr(coordinate, part)))
    trends = [_trend(layer, part, points) for (layer, part), points in rows.items()]
    return CoordinateReport(tuple(trend for trend in trends if trend is not None))


def _trained(
    make_model: Any, width: int, batches: Any, loss_fn: Any, make_optimizer: Any, steps: int, seed: int
) -> list[Coordinate]:
    torch.manual_seed(seed)
    model = make_model(width)
    if not isinstance(model, nn.Module):
        raise NotAModelError(f"make_model({width}) must return a torch.nn.Module; got {type(model).__name__}.")
    reference = copy.deepcopy(model)
    optimizer = make_optimizer(model, width) if make_optimizer else torch.optim.Adam(model.parameters(), lr=1e-3)
    given = batches(seed) if callable(batches) else _repeat(batches)
    x: Any = None
    for step in range(steps):
        batch = next(given, None)
        if batch is None:
            raise UsageError(
                f"batches({seed}) ended after {step} of {steps} steps. Provide more batches, or use fewer steps."
            )
        x, y = batch
        optimizer.zero_grad()
        _, loss = forward(model, x, y, loss_fn)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return refined_coordinate_check(model, reference, x)


def _repeat(batch: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    while True:
        yield batch


def _trend(layer: str, part: str, points: list[tuple[int, float]]) -> Trend | None:
    """Least squares of the logarithms, with a Student's t interval."""
    positive = [(w, v) for w, v in points if v > 0 and math.isfinite(v)]
    if len({w for w, _ in positive}) < 2:
        return None
    x, y = np.log2([w for w, _ in positive]), np.log2([v for _, v in positive])
    centred = x - x.mean()
    slope = float((centred * y).sum() / (centred**2).sum())
    rest = y - y.mean() - slope * centred
    freedom = len(x) - 2
    error = _student(freedom) * math.sqrt((rest**2).sum() / max(freedom, 1) / (centred**2).sum())
    widths = tuple(sorted({w for w, _ in positive}))
    values = tuple(float(np.mean([v for w, v in positive if w == width])) for width in widths)
    return Trend(
        layer=layer, part=part, slope=slope, error=error, verdict=_verdict(slope, error), widths=widths, values=values
    )


def _verdict(slope: float, error: float) -> Verdict:
    if slope - error > FLAT:
        return "grows"
    if slope + error < -FLAT:
        return "vanishes"
    return "stable" if abs(slope) + error < 3 * FLAT else "unclear"


def _student(freedom: int) -> float:
    """The quantile for these degrees of freedom, or the next fewer in the table: too wide rather than too narrow."""
    return _STUDENT[max(known for known in _STUDENT if known <= freedom)]


# 97.5 % quantiles of Student's distribution.
_STUDENT: Final = {
    0: 12.7, 1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 12: 2.18,
    13: 2.16, 14: 2.14, 15: 2.13, 16: 2.12, 18: 2.10, 20: 2.09, 22: 2.07, 25: 2.06, 28: 2.05,
    40: 2.02, 60: 2.00, 120: 1.98,
}  # fmt: skip
