"""Statistics of units, the channels of a layer: dead, saturated, effective rank, spread. Tensors in, 0-d tensors out.

Everything is computed on a strided sample and stays on its device; nothing here waits, draws random numbers, or keeps
an input tensor.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import torch
from torch import Tensor

MAX_RANK_ROWS: Final = 128
MAX_RANK_UNITS: Final = 256
MAX_SEEN: Final = 1 << 16
"""Elements of a layer that are checked for dead and saturated units."""
MAX_WEIGHT: Final = 1 << 14
SATURATED_AT: Final = 5.0
WINDOW: Final = 8
"""Number of inspections after which a silent unit is dead."""


def strided(tensor: Tensor, dim: int, size: int) -> Tensor:
    """A view with about `size` evenly spaced entries along `dim`, at most `size`."""
    length = tensor.shape[dim]
    step = -(-length // max(size, 1))
    return tensor if step <= 1 else tensor[(slice(None),) * (dim % tensor.ndim) + (slice(0, None, step),)]


def as_rows(tensor: Tensor, channel_dim: int, max_rows: int) -> Tensor:
    """(rows, units): units are the channels, rows evenly spaced samples over everything else."""
    values = tensor.detach()
    if channel_dim != values.ndim - 1:
        values = values.movedim(channel_dim, -1)
    if values.ndim == 1:
        values = values[None]
    # Subsample before the copy that flattening may need; the batch last, for its rows differ most.
    num_rows = math.prod(values.shape[:-1])
    for dim in range(values.ndim - 2, -1, -1):
        if num_rows <= max_rows:
            break
        wanted = max(1, math.ceil(values.shape[dim] * max_rows / num_rows))
        num_rows //= values.shape[dim]
        values = strided(values, dim, wanted)
        num_rows *= values.shape[dim]
    return values.reshape(-1, values.shape[-1])


def is_silent(tensor: Tensor, channel_dim: int) -> Tensor:
    """(units,) bool: whether a unit was exactly zero in every sample. NaN is not zero."""
    rows = as_rows(tensor, channel_dim, max(128, MAX_SEEN // max(tensor.shape[channel_dim], 1)))
    return (rows.amax(0) == 0) & (rows.amin(0) == 0)


class SilentUnits:
    """Units of one layer that were silent over a window of inspections; one mask for each call of the layer."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[int, deque[Tensor]] = {}

    def add(self, call: int, silent: Tensor) -> None:
        seen = self._seen.setdefault(call, deque(maxlen=WINDOW))
        if seen and (seen[-1].shape != silent.shape or seen[-1].device != silent.device):
            seen.clear()  # the layer has changed its width, or moved
        seen.append(silent)

    def share(self) -> Tensor:
        """Fraction of units that were silent in every inspection of the window."""
        dead = [torch.stack(list(seen)).all(0) for seen in self._seen.values()]
        return (dead[0] if len(dead) == 1 else torch.cat(dead)).float().mean()


def saturated(tensor: Tensor) -> Tensor:
    """Fraction of elements in the saturated range of a sigmoid or tanh."""
    rows = as_rows(tensor, tensor.ndim - 1, max(1, MAX_SEEN // max(tensor.shape[-1], 1)))
    return (rows.abs() > SATURATED_AT).float().mean()


def effective_rank(rows: Tensor) -> Tensor:
    """Participation ratio (tr C)^2 / tr C^2 of the centred covariance C of (samples, units); 0 for constant rows.

    Uses the smaller product: X X^T has the same non-zero eigenvalues as X^T X.
    """
    centred = rows - rows.mean(0)
    # Scaled, so that the fourth powers below neither vanish nor overflow.
    centred = centred / centred.abs().amax().clamp_min(torch.finfo(centred.dtype).tiny)
    gram = centred @ centred.T if len(centred) <= centred.shape[1] else centred.T @ centred
    trace, squares = gram.diagonal().sum(), gram.square().sum()
    return torch.where(squares > 0, trace.square() / squares, 0.0 * trace)


def rank_rows(tensor: Tensor, channel_dim: int) -> Tensor:
    """The (samples, units) sample for the rank, at most 128 x 256, in float32."""
    rows = as_rows(tensor, channel_dim, MAX_RANK_ROWS)
    return strided(rows, 1, MAX_RANK_UNITS).float().contiguous()


def batch_std(tensor: Tensor) -> Tensor:
    """Standard deviation over the batch, averaged over units, over the root mean square; 0: all outputs are equal."""
    flat = strided(strided(tensor.detach(), 0, 64).flatten(1), 1, 1024).float().contiguous()
    spread = (flat - flat.mean(0)).square().mean(0).sqrt().mean()
    size = flat.square().mean().sqrt()
    return torch.where(size > 0, spread / size, 0.0 * spread)


def row_spread(weight: Tensor) -> Tensor:
    """max |w - mean over rows| / rms(w): 0 if all units are the same. A unit is a row of the weight."""
    rows = strided(weight.detach().flatten(1), 0, 512)
    rows = strided(rows, 1, max(1, MAX_WEIGHT // len(rows))).float().contiguous()
    size = rows.square().mean().sqrt()
    furthest = (rows - rows.mean(0)).abs().amax()
    return torch.where(size > 0, furthest / size, 0.0 * furthest)


def skip_gain(given: Tensor, out: Tensor) -> Tensor:
    """How much of its input a block passes on: <out, in> / <in, in>. 1 with a skip connection, near 0 without.

    Uses deviations from each unit's mean: otherwise positive values on both sides of a rectified block would look
    alike.
    """
    return sampled_skip_gain(some_units(given).float(), some_units(out).float())


def some_units(tensor: Tensor) -> Tensor:
    """(rows, units): the sample of a block's input or output for `sampled_skip_gain`."""
    return as_rows(tensor, tensor.ndim - 1, max(1, MAX_SEEN // max(tensor.shape[-1], 1)))


def sampled_skip_gain(given: Tensor, out: Tensor) -> Tensor:
    """`skip_gain` from samples (..., rows, units) in float32: several blocks of one shape may be stacked in front."""
    x, y = given - given.mean(-2, keepdim=True), out - out.mean(-2, keepdim=True)
    return (x * y).sum((-2, -1)) / (x * x).sum((-2, -1))
