"""A tensor as a small image (the element of largest magnitude of each block, with its sign) and singular values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.schema.thinning import group_starts

MAX_SIDE: Final = 512
MAX_SPECTRUM_SIDE: Final = 1024
BLOCK_ELEMENTS: Final = 8 << 20

Image = NDArray[np.float32]
ReadRows = Callable[[int, int], NDArray[Any]]
"""Rows `begin:end` of the tensor along its first axis."""


@dataclass(slots=True)
class ImageOf:
    """The image of a tensor, gathered block by block, so that a tensor may be larger than memory."""

    num_rows: int
    num_columns: int
    pixels: Image = field(init=False)
    low: float = np.inf
    high: float = -np.inf
    sumsq: float = 0.0
    num_finite: int = 0
    num_nan: int = 0
    num_inf: int = 0
    _sample: list[NDArray[np.float64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pixels = np.zeros((min(self.num_rows, MAX_SIDE), min(self.num_columns, MAX_SIDE)), np.float32)

    def add(self, begin: int, block: NDArray[np.float64]) -> None:
        """Add rows starting at `begin`."""
        finite = np.isfinite(block)
        kept = block[finite]
        self.num_nan += int(np.isnan(block).sum())
        self.num_inf += int(np.isinf(block).sum())
        self.num_finite += kept.size
        if kept.size:
            self.low, self.high = min(self.low, float(kept.min())), max(self.high, float(kept.max()))
            self.sumsq += float(np.square(kept).sum())
        self._pool(begin, block)
        chosen = _even(self.num_rows, MAX_SPECTRUM_SIDE)
        inside = chosen[(chosen >= begin) & (chosen < begin + len(block))] - begin
        self._sample.append(block[np.ix_(inside, _even(self.num_columns, MAX_SPECTRUM_SIDE))])

    def _pool(self, begin: int, block: NDArray[np.float64]) -> None:
        height, width = self.pixels.shape
        across = largest(block, _bounds(self.num_columns, width), axis=1)
        rows = (np.arange(begin, begin + len(block)) * height) // max(self.num_rows, 1)
        starts = group_starts(rows)
        down = largest(across, starts, axis=0)
        at = rows[starts]
        self.pixels[at] = further(self.pixels[at], down.astype(np.float32))

    @property
    def rms(self) -> float:
        return float(np.sqrt(self.sumsq / self.num_finite)) if self.num_finite else np.nan

    def spectrum(self) -> tuple[NDArray[np.float64], tuple[int, int]]:
        """Singular values of the sampled rows and columns, largest first; empty for vectors and non-finite values."""
        matrix = np.concatenate(self._sample) if self._sample else np.empty((0, 0))
        if min(matrix.shape) < 2 or self.num_nan or self.num_inf:
            return np.empty(0), (int(matrix.shape[0]), int(matrix.shape[1]))
        values = np.asarray(np.linalg.svd(matrix, compute_uv=False), np.float64)
        return values, (int(matrix.shape[0]), int(matrix.shape[1]))


def image_of(read: ReadRows, num_rows: int, num_columns: int) -> ImageOf:
    image = ImageOf(num_rows, num_columns)
    step = max(1, BLOCK_ELEMENTS // max(num_columns, 1))
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        image.add(begin, np.asarray(read(begin, end)).astype(np.float64).reshape(end - begin, num_columns))
    return image


def largest(values: NDArray[np.float64], starts: NDArray[np.intp], *, axis: int) -> NDArray[np.float64]:
    """The element of largest magnitude of each group along an axis; non-finite elements count as largest."""
    if len(starts) == values.shape[axis]:
        return values
    odd = np.add.reduceat((~np.isfinite(values)).astype(np.int32), starts, axis=axis) > 0
    finite = np.where(np.isfinite(values), values, 0.0)
    high, low = np.maximum.reduceat(finite, starts, axis=axis), np.minimum.reduceat(finite, starts, axis=axis)
    found = np.where(high >= -low, high, low)
    with np.errstate(invalid="ignore"):
        strange = np.add.reduceat(np.where(np.isfinite(values), 0.0, values), starts, axis=axis)
    return np.where(odd, strange, found)


def further(a: Image, b: Image) -> Image:
    """The elementwise value of larger magnitude."""
    with np.errstate(invalid="ignore"):
        take_b = ~np.isfinite(b) | (np.isfinite(a) & (np.abs(b) > np.abs(a)))
    chosen: Image = np.where(take_b & ~np.isnan(a), b, a)
    return chosen


def _bounds(size: int, count: int) -> NDArray[np.intp]:
    """The start of each of `count` nearly equal groups."""
    return -(-(np.arange(count) * size) // max(count, 1)) if count < size else np.arange(size)


def _even(size: int, limit: int) -> NDArray[np.intp]:
    return np.arange(size) if size <= limit else np.linspace(0, size - 1, limit).astype(np.intp)
