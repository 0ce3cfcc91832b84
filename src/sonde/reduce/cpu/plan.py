"""A fixed list of tensors as blocks of rows: small ones packed into one buffer, large ones read in place.

The same plan divides parameters, gradients and moments alike, so their blocks line up and can be multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.cpu.rows import CHUNK_ROWS, ROW, Block, Tails, on_device, scratch
from sonde.reduce.dense import flat

LARGE: Final = 1 << 17
"""From this size on, a pass per tensor costs less than packing it."""
LARGE_KEPT: Final = 1 << 22
"""The same if a copy is made in any case and nothing else has to be read."""
DEVICE_ROW: Final = 4096
"""Rows are longer on an accelerator: there partials are float64 from the start, and fewer of them are copied."""


Fill = Callable[[int], None]
"""Fills the memory of the chunk with this number; large tensors come after the chunks."""


class Chunk(NamedTuple):
    """Packed tensors that are filled together, and read while they are still in the cache."""

    first_row: int
    end_row: int
    slots: slice


class Plan:
    """The rows of each tensor. All tensors share a device and a work dtype; none is empty."""

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device, *, large: int = LARGE) -> None:
        self.dtype, self.device = dtype, device
        self.row = ROW if device.type == "cpu" else DEVICE_ROW
        self.small = [i for i, numel in enumerate(numels) if numel < large]
        self.large = [i for i, numel in enumerate(numels) if numel >= large]
        self.order = np.array(self.small + self.large, dtype=np.intp)
        self.numels = np.array([numels[i] for i in self.order], dtype=np.int64)
        heights = -(-self.numels // self.row)
        self.starts = np.concatenate([[0], np.cumsum(heights)[:-1]]).astype(np.intp)
        self.num_rows = int(heights.sum())
        self.packed_rows = int(heights[: len(self.small)].sum())
        self.offsets = (self.starts[: len(self.small)] * self.row).tolist()
        self._on_device: tuple[Tensor, Tensor] | None = None

    def on_device(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Row offsets and element counts on the plan's device, copied there once."""
        if self._on_device is None:
            offsets = on_device([*self.starts.tolist(), self.num_rows], self.device)
            self._on_device = offsets, on_device(self.numels.tolist(), self.device, dtype)
        return self._on_device

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Whole tensors, together about CHUNK_ROWS rows; one that has more is a separate chunk."""
        ends = [*self.starts[: len(self.small)].tolist(), self.packed_rows][1:]
        found: list[Chunk] = []
        first_row = first = 0
        for place, end in enumerate(ends):
            is_last = place + 1 == len(ends)
            if is_last or ends[place + 1] - first_row > CHUNK_ROWS:
                found.append(Chunk(first_row, end, slice(first, place + 1)))
                first_row, first = end, place + 1
        return found

    def tails(self, chunk: Chunk, first: int, end: int) -> Tails | None:
        """The rows of this piece of a chunk that are only partly filled."""
        found = [
            (start + numel // self.row - first, numel % self.row)
            for start, numel in zip(self.starts[chunk.slots].tolist(), self.numels[chunk.slots].tolist(), strict=True)
            if numel % self.row and first <= start + numel // self.row < end
        ]
        return Tails([row for row, _ in found], [width for _, width in found], self.row, self.device) if found else None

    def blocks(
        self,
        held: Held,
        tensors: Sequence[Tensor] | None = None,
        *,
        fill: Fill | None = None,
        purpose: str = "converted",
    ) -> Iterator[Block]:
        """Blocks over all tensors: the packed ones from `held`, large ones as passed in or as held.

        `fill` is the method of `Held` that fills its memory just before a chunk or a large tensor is read. Concurrent
        walks need different purposes: `purpose` names the memory for converted pieces.
        """
        for number, blocks in enumerate(held.packed_blocks):
            if fill is not None:
                fill(number)
            yield from blocks
        for place, index in enumerate(self.large):
            if fill is not None:
                fill(len(self.chunks) + place)
            values = flat(tensors[index]) if tensors is not None else held.large[place]
            start = int(self.starts[len(self.small) + place])
            yield from row_blocks(values, self.dtype, first_row=start, row=self.row, purpose=purpose)


def row_blocks(
    values: Tensor, dtype: torch.dtype, *, first_row: int = 0, row: int = ROW, purpose: str = "converted"
) -> Iterator[Block]:
    """Blocks of a flat tensor, in the work dtype; the rest of the last row is a separate block."""
    size = CHUNK_ROWS * row
    for start in range(0, values.numel(), size):
        piece = values[start : start + size] if values.numel() > size else values
        is_fleeting = piece.dtype != dtype
        if is_fleeting:
            piece = _converted(piece, dtype, purpose)
        full = piece.numel() // row
        first = first_row + start // row
        if full:
            whole = piece if full * row == piece.numel() else piece[: full * row]
            yield Block(first, whole.view(full, row), is_one_tensor=True, is_fleeting=is_fleeting)
        if full * row < piece.numel():
            yield Block(first + full, piece[full * row :].view(1, -1), is_one_tensor=True, is_fleeting=is_fleeting)


def _converted(piece: Tensor, dtype: torch.dtype, purpose: str) -> Tensor:
    if piece.device.type == "cpu":
        return scratch.get(purpose, dtype, (piece.numel(),)).copy_(piece)
    return piece.to(dtype)


class Held:
    """Memory for the tensors of a plan: the packed part always, the large ones only if a copy must be kept."""

    def __init__(self, plan: Plan, shapes: Sequence[torch.Size], *, keep_large: bool = False) -> None:
        self.plan = plan
        with torch.inference_mode(False):  # memory allocated in inference mode could never be written outside of it
            self._allocate(plan, shapes, keep_large)

    def _allocate(self, plan: Plan, shapes: Sequence[torch.Size], keep_large: bool) -> None:
        # Zeroed once: the gaps between tensors stay zero for ever.
        self.packed = torch.zeros(plan.packed_rows * plan.row, dtype=plan.dtype, device=plan.device)
        self.slots = [
            self.packed[offset : offset + int(numel)].view(shapes[index])
            for offset, numel, index in zip(plan.offsets, plan.numels, plan.small, strict=False)
        ]
        self.large = [
            torch.empty(int(numel), dtype=plan.dtype, device=plan.device)
            for numel in (plan.numels[len(plan.small) :] if keep_large else ())
        ]
        self.large_slots = [values.view(shapes[index]) for values, index in zip(self.large, plan.large, strict=False)]

    @cached_property
    def packed_blocks(self) -> list[list[Block]]:
        """The packed part, by chunks; at most CHUNK_ROWS rows per block."""
        packed = self.packed.view(-1, self.plan.row)
        return [
            [
                Block(first, packed[first:end], self.plan.tails(chunk, first, end))
                for first in range(chunk.first_row, chunk.end_row, CHUNK_ROWS)
                for end in [min(first + CHUNK_ROWS, chunk.end_row)]
            ]
            for chunk in self.plan.chunks
        ]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors in, converting them to the work dtype."""
        self._all(torch._foreach_copy_, tensors)

    def subtract(self, tensors: Sequence[Tensor]) -> None:
        self._all(torch._foreach_sub_, tensors)

    def loading(self, tensors: Sequence[Tensor]) -> Fill:
        """The same as `load`, for one chunk of the plan or one large tensor at a time."""
        return partial(self._one, torch._foreach_copy_, [tensors[i] for i in self.plan.order])

    def subtracting(self, tensors: Sequence[Tensor]) -> Fill:
        """The same as `subtract`, for one chunk or one large tensor at a time."""
        return partial(self._one, torch._foreach_sub_, [tensors[i] for i in self.plan.order])

    def _all(self, operation: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        if self.slots:
            operation(self.slots, [tensors[i] for i in self.plan.small])
        if self.large_slots:
            operation(self.large_slots, [tensors[i] for i in self.plan.large])

    def _one(self, operation: Callable[..., Any], in_order: Sequence[Tensor], number: int) -> None:
        chunks = self.plan.chunks
        if number < len(chunks):
            slots = chunks[number].slots
            operation(self.slots[slots], in_order[slots])
        elif self.large_slots:
            place = number - len(chunks)
            operation([self.large_slots[place]], [in_order[len(self.slots) + place]])
