"""Blocks of tensors to partial sums per row: fast on the CPU, and repaired where necessary.

The fast way is float32 within a row and float64 across rows, seven passes over a block that is still in the cache. A
row with a NaN or an infinity, or whose squares leave float32's range, is recomputed in float64, with non-finite values
counted and left out; zeros are counted only in rows that have some.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.schema.sketch import (
    INF,
    MAX,
    MIN,
    NAN,
    SUM,
    SUMABS,
    SUMSQ,
    ZERO,
    Array,
    N,
    empty_rows,
)

ROW: Final = 512
CHUNK_ROWS: Final = 1024
"""Rows per pass, so that a pass finds the data of the previous one in the cache."""

# Order of the partials of a row.
_SUM, _NORM, _MIN, _MAX, _ABS, _ABS_MIN = range(6)
NUM_PARTIALS: Final = 6

_MAX_VIEWS: Final = 256
_FEW_ROWS: Final = 64
"""Maximum number that numpy counts: it is slower per element but faster per call."""

# Below this norm of a row its squares are denormal and lose digits.
_TINY: Final = {torch.float32: 1e-16, torch.float64: 1e-150}
_HUGE: Final = {torch.float32: 3e38, torch.float64: 1e308}


class _Scratch(threading.local):
    """Buffers per thread, because hooks may fire on several threads at once."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.views: dict[tuple[str, torch.dtype, tuple[int, ...]], Tensor] = {}

    def get(self, purpose: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        view = self.views.get((purpose, dtype, shape))
        return self._view(purpose, dtype, shape) if view is None else view

    def _view(self, purpose: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        key = (purpose, dtype)
        numel = math.prod(shape)
        # Memory and views created in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            if key not in self.buffers or self.buffers[key].numel() < numel:
                self.buffers[key] = torch.empty(max(numel, CHUNK_ROWS * ROW), dtype=dtype, device="cpu")
                self.views.clear()
            if len(self.views) >= _MAX_VIEWS:  # for shapes that change all the time
                self.views.clear()
            view = self.views[purpose, dtype, shape] = self.buffers[key][:numel].view(shape)
        return view


scratch = _Scratch()


def on_device(values: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Our numbers on the tensors' device. Only a copy from pinned memory to a GPU does not block."""
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Tails:
    """Rows of a packed block that are only partly filled; the rest of such a row is zero."""

    def __init__(self, rows: list[int], widths: list[int], row_size: int, device: torch.device) -> None:
        self.rows = on_device(rows, device)
        self.widths = np.array(widths)
        self.filled = torch.arange(row_size, device=device) < on_device(widths, device)[:, None]
        self.mask = ~self.filled


class Block(NamedTuple):
    """Some rows of some tensor, in the work dtype."""

    first_row: int
    values: Tensor
    tails: Tails | None = None
    is_one_tensor: bool = False
    """Whether all rows belong to one tensor: its extremes need not be computed row by row."""
    is_fleeting: bool = False
    """Whether the next block overwrites the values."""

    @property
    def width(self) -> NDArray[np.intp]:
        """The number of elements of each row that count."""
        width = np.full(self.values.shape[0], self.values.shape[1])
        if self.tails is not None:
            width[self.tails.rows.numpy()] = self.tails.widths
        return width


@dataclass(slots=True)
class Partials:
    """Partial sums of R rows; `repair` fixes those that the fast way got wrong."""

    num_rows: int
    dtype: torch.dtype
    columns: tuple[Tensor, ...] = field(init=False)
    view: NDArray[Any] = field(init=False)
    zeros: NDArray[np.int64] = field(init=False)
    """Zeros in each row, once repaired."""
    repaired: list[tuple[int, Array]] = field(default_factory=list)
    """(row, sketch of that row), instead of the partials."""
    slices: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    all_tails: tuple[list[Tails], NDArray[np.int64], NDArray[np.bool_]] | None = None
    """The partly filled rows of all blocks: their values, their rows here, and the elements that do not count."""

    def __post_init__(self) -> None:
        with torch.inference_mode(False):
            values = torch.empty((NUM_PARTIALS, self.num_rows), dtype=self.dtype, device="cpu")
        self.columns = values.unbind(0)
        self.view = values.numpy()
        self.zeros = np.zeros(self.num_rows, np.int64)

    def run(self, blocks: Iterable[Block]) -> None:
        self.repaired.clear()
        self.zeros[:] = 0
        kept = []
        for block in blocks:
            self._reduce(block)
            if block.is_fleeting:
                self._repair([block])
            else:
                kept.append(block)
        self._mend_tails([(block.values, block.tails, block.first_row) for block in kept if block.tails is not None])
        if kept:
            self._repair(kept)

    def _reduce(self, block: Block) -> None:
        """The fast way, for one block."""
        values = block.values
        columns = self._columns(block.first_row, values.shape[0])
        lowest = self._extremes(block, columns)
        torch.sum(values, 1, out=columns[_SUM])
        torch.linalg.vector_norm(values, 2, 1, out=columns[_NORM])
        if lowest >= 0:
            # No negative values (ReLU, Adam's second moment): magnitudes are the values. NaN compares false.
            columns[_ABS].copy_(columns[_SUM])
            columns[_ABS_MIN].copy_(columns[_MIN])
        else:
            magnitude = scratch.get("magnitude", self.dtype, tuple(values.shape))
            torch.abs(values, out=magnitude)
            torch.sum(magnitude, 1, out=columns[_ABS])
            torch.amin(magnitude, 1, out=columns[_ABS_MIN])

    def _extremes(self, block: Block, columns: tuple[Tensor, ...]) -> float:
        """Smallest and largest of each row, or of all rows if that is enough; returns the smallest of all."""
        if block.is_one_tensor:
            lowest, highest = (extreme.item() for extreme in torch.aminmax(block.values))
            if math.isfinite(lowest) and math.isfinite(highest):
                columns[_MIN].fill_(lowest)
                columns[_MAX].fill_(highest)
                return lowest
        torch.amin(block.values, 1, out=columns[_MIN])
        torch.amax(block.values, 1, out=columns[_MAX])
        return float(self.view[_MIN, block.first_row : block.first_row + len(block.values)].min())

    def _columns(self, first_row: int, num_rows: int) -> tuple[Tensor, ...]:
        if num_rows == self.num_rows:
            return self.columns
        key = (first_row, num_rows)
        if key not in self.slices:
            self.slices[key] = tuple(column.narrow(0, first_row, num_rows) for column in self.columns)
        return self.slices[key]

    def _mend_tails(self, blocks: list[tuple[Tensor, Tails, int]]) -> None:
        """The padding zeros after a tail do not belong to the tensor: compute the extremes without them. Few rows, so
        numpy is faster."""
        if not blocks:
            return
        tails = [tails for _, tails, _ in blocks]
        if self.all_tails is None or self.all_tails[0] != tails:
            rows = np.concatenate([tails.rows.numpy() + first_row for _, tails, first_row in blocks])
            self.all_tails = tails, rows, np.concatenate([tails.mask.numpy() for tails in tails])
        _, rows, mask = self.all_tails
        part = np.concatenate([values.numpy()[tails.rows.numpy()] for values, tails, _ in blocks])
        with np.errstate(invalid="ignore"):  # rows with a NaN are recomputed
            np.copyto(part, np.inf, where=mask)
            self.view[_MIN, rows] = part.min(axis=1)
            self.view[_ABS_MIN, rows] = np.abs(part).min(axis=1)
            np.copyto(part, -np.inf, where=mask)
            self.view[_MAX, rows] = part.max(axis=1)

    def _repair(self, blocks: list[Block]) -> None:
        """Count zeros in rows that have some, and recompute in float64 the rows that the fast way got wrong."""
        start = blocks[0].first_row
        part = self.view[:, start : blocks[-1].first_row + len(blocks[-1].values)]
        with_zeros = part[_ABS_MIN] == 0
        # A comparison with NaN is false, so a row with a NaN is not good.
        good = part[_NORM] <= _HUGE[self.dtype]
        good &= (part[_NORM] >= _TINY[self.dtype]) | (part[_ABS] == 0)
        if good.all() and not with_zeros.any():
            return
        for block in blocks:
            rows = slice(block.first_row - start, block.first_row - start + len(block.values))
            if with_zeros[rows].any():
                self._count_zeros(block, with_zeros[rows])
            if not good[rows].all():
                self._redo(block, np.flatnonzero(~good[rows]))

    def _count_zeros(self, block: Block, with_zeros: NDArray[np.bool_]) -> None:
        rows = np.flatnonzero(with_zeros)
        width = block.values.shape[1] if block.tails is None else block.width[rows]
        if len(rows) <= _FEW_ROWS:
            nonzero = np.count_nonzero(block.values[torch.from_numpy(rows)].numpy(), axis=1)
        else:
            nonzero = self._count_nonzero(block, rows)
        self.zeros[rows + block.first_row] = width - nonzero

    def _count_nonzero(self, block: Block, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Zeros of many rows; for rows of nothing but zeros they are already known."""
        mixed = rows[self.view[_ABS, rows + block.first_row] != 0]
        counts = np.zeros(len(block.values), np.int64)
        if len(mixed):
            whole = 2 * len(mixed) > len(block.values)
            values = block.values if whole else block.values[torch.from_numpy(mixed)]
            flags = scratch.get("magnitude", self.dtype, tuple(values.shape))
            # abs().sign() is 1 for non-zero elements; a sum of ROW ones is exact. NaN rows are recomputed anyway.
            nonzero = torch.sign(torch.abs(values, out=flags), out=flags).sum(1).numpy()
            counts[mixed] = np.nan_to_num(nonzero[mixed] if whole else nonzero).astype(np.int64)
        return counts[rows]

    def _redo(self, block: Block, bad: NDArray[np.intp]) -> None:
        sketches = _sketch_rows(block.values[torch.from_numpy(bad)], block.width[bad])
        rows = bad + block.first_row
        self.view[:, rows] = np.array([0, 0, np.inf, -np.inf, 0, 0])[:, None]
        self.zeros[rows] = 0
        self.repaired.extend(zip(rows.tolist(), sketches, strict=True))


def _sketch_rows(values: Tensor, width: NDArray[np.intp]) -> Array:
    """The slow and careful way, one sketch per row; only the first `width` elements of a row count."""
    wide = values.double().numpy()
    finite = np.isfinite(wide) & (np.arange(wide.shape[1]) < width[:, None])
    kept = np.where(finite, wide, 0.0)
    rows = empty_rows(len(wide))
    rows[:, N] = width
    rows[:, NAN] = np.isnan(wide).sum(axis=1)
    rows[:, INF] = np.isinf(wide).sum(axis=1)
    rows[:, ZERO] = (finite & (wide == 0)).sum(axis=1)
    with np.errstate(over="ignore", under="ignore"):
        rows[:, SUM] = kept.sum(axis=1)
        rows[:, SUMSQ] = (kept * kept).sum(axis=1)
        rows[:, SUMABS] = np.abs(kept).sum(axis=1)
    rows[:, MIN] = np.where(finite, wide, np.inf).min(axis=1)
    rows[:, MAX] = np.where(finite, wide, -np.inf).max(axis=1)
    return rows


def combine(parts: list[Partials], starts: NDArray[np.intp], numel: NDArray[np.int64]) -> Array:
    """Sketch rows of T tensors: tensor t owns the rows from starts[t] on, at least one."""
    rows = empty_rows(len(numel))
    rows[:, N] = numel
    columns = (
        parts[0].view.astype(np.float64)
        if len(parts) == 1
        else np.concatenate([part.view for part in parts], axis=1, dtype=np.float64)
    )
    columns[_NORM] *= columns[_NORM]
    sums = np.add.reduceat(columns[[_SUM, _NORM, _ABS]], starts, axis=1)
    rows[:, SUM], rows[:, SUMSQ], rows[:, SUMABS] = sums
    rows[:, MIN] = np.minimum.reduceat(columns[_MIN], starts)
    rows[:, MAX] = np.maximum.reduceat(columns[_MAX], starts)
    rows[:, ZERO] = np.add.reduceat(np.concatenate([part.zeros for part in parts]), starts)
    if any(part.repaired for part in parts):
        _add_repaired(rows, parts, starts)
    return rows


def _add_repaired(rows: Array, parts: list[Partials], starts: NDArray[np.intp]) -> None:
    offset = 0
    added = [NAN, INF, ZERO, SUM, SUMSQ, SUMABS]
    for part in parts:
        if part.repaired:
            owner = np.searchsorted(starts, [offset + row for row, _ in part.repaired], side="right") - 1
            sketches = np.stack([sketch for _, sketch in part.repaired])
            for column in added:
                np.add.at(rows[:, column], owner, sketches[:, column])
            np.minimum.at(rows[:, MIN], owner, sketches[:, MIN])
            np.maximum.at(rows[:, MAX], owner, sketches[:, MAX])
        offset += part.num_rows
