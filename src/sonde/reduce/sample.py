"""Deterministic, rotating samples of tensors: elements for histograms, rows of large tensors. No random numbers are
used."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from sonde.reduce.dense import flat, is_dense

PRIME: Final = 2_654_435_761
"""Shares no factor with any number of possible starts, so that every start has its turn."""


def sample(tensor: Tensor, size: int, turn: int) -> Tensor:
    """At most `size` evenly spaced elements; `turn` moves the start.

    The stride shares no factor with the number of elements, hence with no dimension: every column is sampled.
    """
    values = flat(tensor)
    if values.numel() <= size:
        return values
    stride = stride_of(values.numel(), size)
    span = (size - 1) * stride + 1
    start = (turn * PRIME) % (values.numel() - span + 1)
    return values[start : start + span : stride]


def stride_of(numel: int, size: int) -> int:
    """The distance between sampled elements."""
    stride = max(numel // size, 1)
    while math.gcd(stride, numel) > 1:
        stride -= 1
    return stride


def some_rows(tensor: Tensor, count: int, turn: int) -> Tensor:
    """At most `count` evenly spaced rows of a strided tensor; `turn` moves the first. A row is as many neighbours in
    memory as the last dimension has. A tensor with fewer rows, or with gaps, is returned unchanged.

    >>> some_rows(torch.arange(12).view(2, 3, 2), 2, turn=0).tolist()
    [[0, 1], [6, 7]]
    """
    if tensor.ndim < 2 or tensor.numel() <= count * tensor.shape[-1] or not is_dense(tensor):
        return tensor
    rows = flat(tensor.detach()).view(-1, tensor.shape[-1])
    step = -(-len(rows) // count)
    return rows[(turn * PRIME) % step :: step]


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
