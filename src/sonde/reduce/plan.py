"""A fixed list of tensors as blocks of rows: small ones packed into one buffer, large ones read where they are.

The same plan cuts parameters, gradients and moments alike, so their blocks line up and can be multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.dense import flat
from sonde.reduce.rows import CHUNK_ROWS, ROW, Block, Tails, on_device, scratch

LARGE: Final = 1 << 17
"""From this size on a pass per tensor costs less than packing it."""
LARGE_KEPT: Final = 1 << 22
"""The same where a copy is made in any case and nothing has to be read beside it."""
DEVICE_ROW: Final = 4096
"""Rows are longer on an accelerator: there partials are float64 from the start, and fewer of them travel."""


class Plan:
    """Where each tensor's rows are. All tensors share a device and a work dtype; none is empty."""

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
    def tails(self) -> dict[int, Tails]:
        """The partly filled rows of each chunk of the packed buffer, by the chunk's first row; no fused kernel asks."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for start, numel in zip(self.starts[: len(self.small)].tolist(), self.numels.tolist(), strict=False):
            if numel % self.row:
                chunk, row = divmod(start + numel // self.row, CHUNK_ROWS)
                rows, widths = found.setdefault(chunk * CHUNK_ROWS, ([], []))
                rows.append(row)
                widths.append(numel % self.row)
        return {first: Tails(rows, widths, self.row, self.device) for first, (rows, widths) in found.items()}

    def blocks(
        self, held: Held, tensors: Sequence[Tensor] | None = None, *, purpose: str = "converted"
    ) -> Iterator[Block]:
        """Blocks over all tensors: the packed ones from `held`, large ones as given or as held.

        Walks that go on at the same time need a purpose of their own: it names the memory for converted pieces.
        """
        packed = held.packed.view(-1, self.row)
        for first in range(0, self.packed_rows, CHUNK_ROWS):
            yield Block(first, packed[first : min(first + CHUNK_ROWS, self.packed_rows)], self.tails.get(first))
        for place, index in enumerate(self.large):
            values = flat(tensors[index]) if tensors is not None else held.large[place]
            start = int(self.starts[len(self.small) + place])
            yield from row_blocks(values, self.dtype, first_row=start, row=self.row, purpose=purpose)


def row_blocks(
    values: Tensor, dtype: torch.dtype, *, first_row: int = 0, row: int = ROW, purpose: str = "converted"
) -> Iterator[Block]:
    """Blocks of a flat tensor, in the work dtype; what is left of the last row is a block of its own."""
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
    """Memory for the tensors of a plan: the packed part always, the large ones only where a copy must be kept."""

    def __init__(self, plan: Plan, shapes: Sequence[torch.Size], *, keep_large: bool = False) -> None:
        self.plan = plan
        with torch.inference_mode(False):  # memory made in inference mode could never be written outside of it
            self._allocate(plan, shapes, keep_large)

    def _allocate(self, plan: Plan, shapes: Sequence[torch.Size], keep_large: bool) -> None:
        # Zeroed once: what lies between two tensors stays zero for ever.
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

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors in, converting them to the work dtype."""
        self._each(torch._foreach_copy_, tensors)

    def subtract(self, tensors: Sequence[Tensor]) -> None:
        """Take the tensors away from what is held."""
        self._each(torch._foreach_sub_, tensors)

    def _each(self, operation: object, tensors: Sequence[Tensor]) -> None:
        assert callable(operation)
        if self.slots:
            operation(self.slots, [tensors[i] for i in self.plan.small])
        if self.large_slots:
            operation(self.large_slots, [tensors[i] for i in self.plan.large])
