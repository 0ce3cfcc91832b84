"""Sketches of a list of tensors that is the same at every step: by fused kernels if possible, otherwise by torch.
Memory is allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.reduce.cpu import native
from sonde.reduce.cpu.native import Act, Pairs
from sonde.reduce.cpu.plan import LARGE, Fill, Held, Plan
from sonde.reduce.cpu.rows import Partials, combine
from sonde.reduce.dense import UnreadableError, addressable, dense, is_plain, work_dtype
from sonde.reduce.gpu.availability import chunk_list, update_chunks
from sonde.reduce.gpu.device import device_rows
from sonde.reduce.sample import sample, stack_samples
from sonde.reduce.table import Table, add_zeros
from sonde.schema.sketch import Array, empty_rows


def current_stream(device: torch.device) -> Any:
    """The current stream for launches; None on devices without streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class TensorList:
    """A list of tensors that is the same at every step, split by device and work dtype, with memory allocated once."""

    def __init__(
        self,
        keys: Sequence[int],
        tensors: Sequence[Tensor],
        hist_samples: int,
        on_unreadable: Callable[[int, str], None],
        *,
        keep: bool = False,
        large: int = LARGE,
    ) -> None:
        self.hist_samples = hist_samples
        self.keys = np.array(keys, np.int32)
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        self.empty: list[int] = []
        self.odd: list[int] = []
        for index, tensor in enumerate(tensors):
            if not is_plain(tensor):
                self.odd.append(index)
            elif not tensor.numel():
                self.empty.append(index)
            else:
                # The fused kernels take one dtype at a time; elsewhere, tensors with the same work dtype go together.
                dtype = tensor.dtype if tensor.device.type == "cuda" else work_dtype(tensor)
                groups.setdefault((tensor.device, dtype), []).append(index)
        self.on_unreadable = on_unreadable
        self.parts = [
            Part(indices, [tensors[i] for i in indices], keep=keep, large=large) for indices in groups.values()
        ]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Keep a copy (`keep=True`) or pack the small ones."""
        for part in self.parts:
            part.held.load([tensors[i].detach() for i in part.indices])

    def sketch(self, tensors: Sequence[Tensor], *, turn: int | None = None) -> list[Table]:
        """Tables of these tensors; with a `turn`, samples for histograms too."""
        tables = []
        for part in self.parts:
            mine = [tensors[i] for i in part.indices]
            if part.reads_in_place:
                mine = [addressable(t) for t in mine]  # a copy must live until its sample is taken
            tables.append(self.table(part, part.read(mine), None if part.keeps else mine, turn))
        return tables + self._odd_tables(tensors, turn)

    def table(
        self,
        part: Part,
        rows: Array | Tensor,
        tensors: Sequence[Tensor] | None,
        turn: int | None,
        keys: NDArray[np.int32] | None = None,
    ) -> Table:
        """The table of one part's rows, with samples of these tensors or of the kept copy; under its own keys, or under
        others."""
        stream = current_stream(part.plan.device)
        table = Table((self.keys if keys is None else keys)[part.key_order], rows, stream=stream)
        if turn is not None and part.chunks is not None:
            table.samples = part.chunks.samples(self.hist_samples, turn)
            table.sampled = np.minimum(part.plan.numels, self.hist_samples)
        elif turn is not None:
            samples = [sample(t.detach(), self.hist_samples, turn) for t in part.in_order(tensors)]
            table.samples = stack_samples(samples, self.hist_samples)
            table.sampled = np.array([s.numel() for s in samples])
        return table

    def _odd_tables(self, tensors: Sequence[Tensor], turn: int | None) -> list[Table]:
        """Sparse, complex, quantized, nested and empty tensors: one by one, converted to dense first."""
        tables = []
        for index in self.odd:
            try:
                values, unstored_zeros = dense(tensors[index].detach())
            except UnreadableError as why:
                self.on_unreadable(int(self.keys[index]), str(why))
                continue
            one = TensorList([int(self.keys[index])], [values], self.hist_samples, self.on_unreadable)
            for table in one.sketch([values], turn=turn):
                add_zeros(table.rows, unstored_zeros)
                tables.append(table)
        return tables + self.empty_tables(self.keys)

    def empty_tables(self, keys: NDArray[np.int32]) -> list[Table]:
        """The table of the tensors without elements, under these keys."""
        return [Table(keys[self.empty], empty_rows(len(self.empty)))] if self.empty else []


class Part:
    """The tensors of a list that share a device and a work dtype."""

    def __init__(self, indices: list[int], tensors: Sequence[Tensor], *, keep: bool, large: int) -> None:
        self.indices = indices
        self.keeps = keep
        device, dtype = tensors[0].device, work_dtype(tensors[0])
        self.plan = Plan([t.numel() for t in tensors], dtype, device, large=large)
        self.chunks = chunk_list(self.plan.numels.tolist(), dtype if keep else tensors[0].dtype, device)
        """The fused kernels of a GPU, if there are any: they read the tensors in place."""
        self._shapes = [t.shape for t in tensors]
        self.updates = update_chunks(self.plan.numels.tolist(), device) if keep else None
        self.paired: dict[str, Held] = {}
        """Memory for tensors that are multiplied with these, by purpose."""
        self.key_order = np.array(indices, dtype=np.intp)[self.plan.order]
        self.addresses = native.addresses(self.in_order(tensors))
        """For the native kernel on the CPU, if there is one: it also reads the tensors in place."""
        by_torch = device.type == "cpu" and self.addresses is None
        self.partials = Partials(self.plan.num_rows, dtype) if by_torch else None

    @cached_property
    def held(self) -> Held:
        """Memory for copies; never allocated if fused kernels read and nothing is kept."""
        return Held(self.plan, self._shapes, keep_large=self.keeps)

    @property
    def reads_in_place(self) -> bool:
        """Whether fused kernels get only addresses, and nothing is kept."""
        return self.chunks is not None and not self.keeps

    def read(self, tensors: Sequence[Tensor]) -> Array | Tensor:
        """Sketch rows of these tensors in the plan's order, on the host or on the device; copies are kept on
        request."""
        if self.addresses is not None:
            if self.keeps:
                return self.addresses.rows(self.in_order(tensors), self.in_order(None), Act.COPY)
            return self.addresses.rows(self.in_order(tensors))
        if self.reads_in_place:
            return self._rows(tensors, None)
        tensors = [t.detach() for t in tensors]
        fill = None
        if self.partials is not None:
            fill = self.held.loading(tensors)
        else:
            self.held.load(tensors)
        return self._rows(None if self.keeps else tensors, fill)

    def can_pair(self, tensors: Sequence[Tensor], pairs: Pairs) -> bool:
        """Whether `subtract` can also compute the paired sums; `pairs` are in the plan's order."""
        return self.addresses is not None and self.addresses.can_pair(self.in_order(tensors), pairs)

    def subtract(self, tensors: Sequence[Tensor], *, is_read: bool, pairs: Pairs | None = None) -> Array | Tensor:
        """Sketch rows of the kept copy minus these. The copy is updated only if it `is_read` afterwards."""
        if self.addresses is not None:
            act = Act.SUBTRACT_INTO if is_read else Act.SUBTRACT
            return self.addresses.rows(self.in_order(tensors), self.in_order(None), act, pairs)
        tensors = [t.detach() for t in tensors]
        fill = None
        if self.partials is not None:
            fill = self.held.subtracting(tensors)
        else:
            self.held.subtract(tensors)
        return self._rows(None, fill)

    def _rows(self, tensors: Sequence[Tensor] | None, fill: Fill | None) -> Array | Tensor:
        """Sketch rows of these tensors or of the kept copy, which the CPU fills chunk by chunk, as it is read."""
        if self.chunks is not None:
            return self.chunks.rows(self.in_order(tensors))
        blocks = self.plan.blocks(self.held, tensors, fill=fill)
        if self.partials is None:
            return device_rows(self.plan, blocks)
        self.partials.run(blocks)
        return combine([self.partials], self.plan.starts, self.plan.numels)

    def in_order(self, tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """In the plan's order: these tensors, or the kept copy."""
        if tensors is None:
            return [*self.held.slots, *self.held.large_slots]
        return [tensors[i] for i in self.plan.order]
