"""Histograms of binary exponents from a stated, rotating sample of each tensor. Never touches a random generator."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.reduce.dense import flat
from sonde.schema.sketch import INF, MIN_EXPONENT, NAN, NUM_BINS, ZERO, Array, N

PRIME: Final = 2_654_435_761
"""Shares no factor with any number of possible starts, so that every start has its turn."""


def sample(tensor: Tensor, size: int, turn: int) -> Tensor:
    """At most `size` elements, evenly apart; `turn` moves the start.

    The stride shares no factor with the number of elements, hence with no dimension: every column is met.
    """
    values = flat(tensor)
    if values.numel() <= size:
        return values
    stride = stride_of(values.numel(), size)
    span = (size - 1) * stride + 1
    start = (turn * PRIME) % (values.numel() - span + 1)
    return values[start : start + span : stride]


def stride_of(numel: int, size: int) -> int:
    """How far apart the sampled elements are."""
    stride = max(numel // size, 1)
    while math.gcd(stride, numel) > 1:
        stride -= 1
    return stride


def histograms(samples: NDArray[np.floating], rows: Array) -> Array:
    """(T, NUM_BINS) estimated counts over all elements from a (T, size) table of samples, padded with zeros.

    A sampled count is scaled by (non-zero finite elements / those in the sample), so that histograms of differently
    sampled tensors merge without bias, and a row's histogram adds up to its number of non-zero finite elements.
    """
    num = len(samples)
    usable = np.isfinite(samples) & (samples != 0)
    _, exponent = np.frexp(np.where(usable, samples, 1.0))
    bins = np.clip(exponent - 1 - MIN_EXPONENT, 0, NUM_BINS - 1)
    bins = np.where(usable, bins, NUM_BINS) + (np.arange(num) * (NUM_BINS + 1))[:, None]
    counts = np.bincount(bins.ravel(), minlength=num * (NUM_BINS + 1)).reshape(num, NUM_BINS + 1)[:, :NUM_BINS]
    seen = counts.sum(axis=1)
    there = rows[:, N] - rows[:, NAN] - rows[:, INF] - rows[:, ZERO]
    scale = np.divide(there, seen, out=np.zeros(num), where=seen > 0)
    scaled: Array = counts * scale[:, None]
    return scaled


def stack_samples(samples: list[Tensor], size: int) -> Tensor:
    """One (T, size) table, padded with zeros, on the samples' device."""
    wide = (
        torch.float64
        if any(s.dtype == torch.float64 or not s.dtype.is_floating_point for s in samples)
        else torch.float32
    )
    if samples[0].device.type == "mps":
        wide = torch.float32
    table = torch.zeros((len(samples), size), dtype=wide, device=samples[0].device)
    torch._foreach_copy_([row[: s.numel()] for row, s in zip(table.unbind(0), samples, strict=True)], samples)
    return table
