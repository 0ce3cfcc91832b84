"""Hashes of tensors on their device: sums of their bits times fixed odd numbers. Nothing waits.

`fingerprint` is one number that two copies of a model share exactly if a sample of their parameters is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.dense import UnreadableError, dense, flat
from sonde.reduce.inspect.strides import NUM_BITS, strided

NUM_WEIGHTS: Final = 4096
_AS_INTEGER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_PARAMETERS: Final = 16
MAX_ELEMENTS: Final = 64


def bits(tensor: Tensor) -> Tensor:
    """A plain tensor's elements as integers of the same size: equal if and only if the bits are."""
    return tensor.view(_AS_INTEGER[tensor.dtype.itemsize])


def weights(num: int, device: torch.device) -> Tensor:
    """The first `num` factors. The upper bits of a sum of products with them are the best ones."""
    assert num <= NUM_WEIGHTS
    return _weights(device)[:num]


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    made = np.random.default_rng(0x50DE).integers(-(2**63), 2**63, NUM_WEIGHTS, dtype=np.int64) | 1
    return torch.from_numpy(made).to(device)


def sampled_bits(tensor: Tensor) -> Any:
    """An array if the tensor is on the host, otherwise a tensor; None if it cannot be read."""
    try:
        plain = dense(tensor.detach())[0]
    except UnreadableError:
        return None
    sampled = bits(strided(flat(plain), plain.numel()))
    return sampled.numpy() if sampled.device.type == "cpu" else sampled


def device_purity(sampled: Tensor, ignore_index: int) -> Tensor:
    """Fraction of the most common of a few labels. In as few launches as possible, since it runs at every step."""
    counts = sampled != ignore_index
    num_same = ((sampled[:, None] == sampled) & counts).sum(1)
    return torch.where(counts, num_same, 0).amax() / counts.sum()


def device_hash(parts: list[Tensor], seed: int) -> Tensor:
    """One integer of 53 bits; the upper ones of 64, since trailing zeros of round numbers spoil the lower."""
    device = parts[0].device
    # cat widens them by itself: fewer launches than converting each.
    joined = torch.cat([part.to(device, non_blocking=True) for part in parts])[:NUM_WEIGHTS]
    mixed: Tensor = (joined * weights(joined.numel(), device)).sum() + (seed << (63 - NUM_BITS))
    upper: Tensor = (mixed >> (64 - NUM_BITS)) & (2**NUM_BITS - 1)
    return upper


def fingerprint(parameters: Iterable[Tensor]) -> Tensor | None:
    """A sum weighted by position, so that swapping two elements changes it; on the device, without waiting."""
    listed = [p for p in parameters if p.numel() and p.is_floating_point()]
    chosen = listed[:: -(-len(listed) // MAX_PARAMETERS)] if listed else []
    if not chosen:
        return None
    with torch.no_grad():
        parts = [_sample(parameter) for parameter in chosen]
        row = torch.cat([part.to(parts[0].device) for part in parts])
        weights = torch.arange(1, len(row) + 1, dtype=torch.float64, device=row.device)
        return (row * weights).sum()


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MAX_ELEMENTS)].double()
