"""The bins of TensorBoard's `add_histogram`, as torch.utils.tensorboard computes them."""

from __future__ import annotations

import functools


@functools.cache
def default_bins() -> list[float]:
    positive: list[float] = []
    edge = 1e-12
    while edge < 1e20:
        positive.append(edge)
        edge *= 1.1
    return [-x for x in reversed(positive)] + [0.0] + positive
