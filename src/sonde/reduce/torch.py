"""Torch tensors to sketches: many in one go, or one at a time, on any device, without waiting for it.

`Reducer` collects the tensors of one step; `take()` hands a step's tables over. A table of an accelerator is still on
its way then: `Table.resolve()` waits for it and is called on the writer's thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.reduce.dense import UnreadableError, dense, flat, is_plain, work_dtype
from sonde.reduce.device import device_rows
from sonde.reduce.gpu import chunk_list, new_bank, update_chunks
from sonde.reduce.plan import LARGE, Fill, Held, Plan, row_blocks
from sonde.reduce.rows import ROW, Partials, combine
from sonde.reduce.sample import sample, stack_samples
from sonde.reduce.table import Table, add_zeros, negate_rows, resolve_all, scale_rows, send, set_raw
from sonde.schema.sketch import Array, empty_rows

if TYPE_CHECKING:
    from sonde.reduce.triton_single import Bank, Read

__all__ = [
    "Part", "Reducer", "Table", "TensorList", "current_stream", "negate_rows", "resolve_all", "scale_rows", "set_raw",
]  # fmt: skip

_MAX_PENDING: Final = 4096
"""Single tensors waiting to be combined; a module called more often than this within a step is combined in between."""


@dataclass(slots=True)
class _Single:
    """One tensor's partials, waiting to be combined with the others of the step."""

    key: int
    partials: Partials
    numel: int
    unstored_zeros: int
    sample: Tensor | None


class Reducer:
    """Sketches of the tensors of one step.

    `add` takes one tensor (an activation), `add_all` a list that is the same in every step (gradients, parameters).
    """

    def __init__(self, *, hist_samples: int = 512, on_unreadable: Callable[[int, str], None] | None = None) -> None:
        self.hist_samples = hist_samples
        self.on_unreadable = on_unreadable or (lambda *_: None)
        self.turn = 0
        self._singles: list[_Single] = []
        self._tables: list[Table] = []
        self._lists: dict[Hashable, tuple[Any, TensorList]] = {}
        self._banks: dict[tuple[torch.device, int], tuple[Any, Bank]] = {}
        """What was read one by one on a GPU, by its stream."""
        self._free: dict[tuple[int, torch.dtype], list[Partials]] = {}
        self._last: tuple[weakref.ref[Tensor], int, _Single | tuple[Bank, Read]] | None = None
        self._lock = threading.RLock()
        """Hooks may fire on several threads: held for an append and a swap only, never while computing."""

    def add(self, key: int, tensor: Tensor, *, histogram: bool = False) -> None:
        """Sketch one tensor now; it may change or be freed afterwards."""
        if self._last is not None and self._add_same(key, tensor):
            return
        try:
            values, unstored_zeros = (tensor, 0) if is_plain(tensor) else dense(tensor.detach())
        except UnreadableError as why:
            self.on_unreadable(key, str(why))
            return
        if not values.is_cpu:
            self._add_on_device(key, tensor, values, unstored_zeros, histogram)
            return
        is_ordinary, values = values is tensor, values.detach()
        dtype = work_dtype(values)
        numel = values.numel()
        partials = self._partials(-(-numel // ROW), dtype)
        values = flat(values)
        partials.run(row_blocks(values, dtype))
        taken = self._sample(values) if histogram else None
        single = _Single(key, partials, numel, unstored_zeros, taken)
        with self._lock:
            self._singles.append(single)
            if is_ordinary:
                self._remember(tensor, single)
        if len(self._singles) >= _MAX_PENDING:
            self._combine_singles()

    def _add_same(self, key: int, tensor: Tensor) -> bool:
        """A container that returns its last child's output: the same numbers under another name."""
        with self._lock:
            last = self._last
            if last is None or last[0]() is not tensor or last[1] != tensor._version:
                return False
            same = last[2]
            if isinstance(same, tuple):
                same[0].again(key, same[1])
                return True
            self._singles.append(_Single(key, same.partials, same.numel, same.unstored_zeros, same.sample))
            return True

    def _remember(self, tensor: Tensor, what: _Single | tuple[Bank, Read]) -> None:
        if not tensor.is_inference():  # which counts no versions
            self._last = weakref.ref(tensor), tensor._version, what

    def add_all(
        self, name: Hashable, keys: Sequence[int], tensors: Sequence[Tensor], *, histogram: bool = False
    ) -> list[Table]:
        """Sketch a list of tensors now, one table per device and dtype; the caller may still adjust the rows."""
        tables = self.list_for(name, keys, tensors).sketch(tensors, turn=self.turn if histogram else None)
        self._tables.extend(tables)
        return tables

    def list_for(
        self, name: Hashable, keys: Sequence[int], tensors: Sequence[Tensor], *, keep: bool = False, large: int = LARGE
    ) -> TensorList:
        """The cached plan for this list; made anew when a shape, dtype or device has changed."""
        # A strided nested tensor has no shape, and asking for it raises.
        form = [
            (key, None if t.is_nested else t.shape, t.dtype, t.device, t.layout)
            for key, t in zip(keys, tensors, strict=True)
        ]
        cached = self._lists.get(name)
        if cached is None or cached[0] != form:
            cached = form, TensorList(keys, tensors, self.hist_samples, self.on_unreadable, keep=keep, large=large)
            self._lists[name] = cached
        return cached[1]

    def hold(self, table: Table) -> None:
        """Add a table made elsewhere to this step."""
        self._tables.append(table)

    @property
    def num_tables(self) -> int:
        return len(self._tables)

    def held_since(self, num_tables: int) -> list[Table]:
        """The tables that came when there had been so many."""
        return self._tables[num_tables:]

    def drop(self, tables: Sequence[Table]) -> None:
        """Leave tables of this step out of it; those of one that was handed over already stay in that."""
        unwanted = {id(table) for table in tables}
        self._tables = [table for table in self._tables if id(table) not in unwanted]

    def take(self) -> list[Table]:
        """The tables of the step, and start anew."""
        self._combine_singles()
        self._combine_banks()
        tables, self._tables = self._tables, []
        send(tables)
        self.turn += 1
        return tables

    def forget(self) -> None:
        """Let go of all memory."""
        with self._lock:
            self._singles, self._tables, self._last = [], [], None
        self._lists, self._banks, self._free = {}, {}, {}

    def _partials(self, num_rows: int, dtype: torch.dtype) -> Partials:
        try:
            return self._free[num_rows, dtype].pop()
        except (KeyError, IndexError):
            return Partials(num_rows, dtype)

    def _sample(self, values: Tensor) -> Tensor:
        return sample(values, self.hist_samples, self.turn).clone()

    def _combine_singles(self) -> None:
        with self._lock:  # a hook on another thread appends to the new list
            singles, self._singles = self._singles, []
            self._last = None
        if not singles:
            return
        for wide in (False, True):
            if group := [s for s in singles if (s.partials.dtype == torch.float64) == wide]:
                self._tables.append(self._combine(group))
        # Only what this step used is kept for the next one: where shapes change all the time, nothing piles up.
        free: dict[tuple[int, torch.dtype], list[Partials]] = {}
        for partials in {id(s.partials): s.partials for s in singles}.values():
            free.setdefault((partials.num_rows, partials.dtype), []).append(partials)
        self._free = free

    def _combine(self, singles: list[_Single]) -> Table:
        rows = empty_rows(len(singles))
        full = [i for i, s in enumerate(singles) if s.numel]
        heights = [singles[i].partials.num_rows for i in full]
        starts = np.concatenate([[0], np.cumsum(heights)[:-1]]).astype(np.intp)
        numel = np.array([singles[i].numel for i in full], dtype=np.int64)
        if full:
            rows[full] = combine([singles[i].partials for i in full], starts, numel)
        for row, single in zip(rows, singles, strict=True):
            add_zeros(row, single.unstored_zeros)
        table = Table(np.array([s.key for s in singles], np.int32), rows)
        samples = [s.sample if s.sample is not None else _NO_SAMPLE for s in singles]
        if any(s.sample is not None for s in singles):
            table.samples = stack_samples(samples, self.hist_samples)
            table.sampled = np.array([s.numel() for s in samples])
        return table

    def _add_on_device(self, key: int, tensor: Tensor, values: Tensor, unstored_zeros: int, histogram: bool) -> None:
        turn = self.turn if histogram else None
        if values.numel() and (bank := self._bank(values)) is not None:
            with self._lock:  # a place in the bank is taken and filled in one go
                if not bank.has_room(values.numel()):
                    self._combine_banks()
                    bank.grow()
                read = bank.read(key, values, unstored_zeros=unstored_zeros, turn=turn)
                if values is tensor:
                    self._remember(tensor, (bank, read))
            return
        listed = self.list_for(("single", key), [key], [values])
        for table in listed.sketch([values], turn=turn):
            add_zeros(table.rows, unstored_zeros)
            self._tables.append(table)

    def _bank(self, values: Tensor) -> Bank | None:
        """Memory for what is read on the stream that is current now; None where the fused kernels cannot read it."""
        if not values.is_cuda:
            return None
        device = values.device
        # By its number: an object for the stream takes longer to make than all the rest here.
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        place = device, stream
        known = self._banks.get(place)
        if known is None:
            bank = new_bank(device, self.hist_samples, stream)
            if bank is None:
                return None
            known = self._banks[place] = current_stream(device), bank
        return known[1] if known[1].reads_dtype(values.dtype) else None

    def _combine_banks(self) -> None:
        with self._lock:
            self._last = None
        for stream, bank in self._banks.values():
            if bank.reads:
                with torch.cuda.stream(stream):
                    self._tables.append(_bank_table(bank, stream))


def _bank_table(bank: Bank, stream: Any) -> Table:
    reads, rows, samples = bank.rows()
    table = Table(np.array([read.key for read in reads], np.int32), rows, stream=stream)
    for row, read in enumerate(reads):
        add_zeros(rows[row], read.unstored_zeros)
    if samples is not None:
        table.samples, table.sampled = samples, np.array([read.sampled for read in reads])
        table.sample_rows = np.array([read.sample_row for read in reads])
    return table


def current_stream(device: torch.device) -> Any:
    """The stream on which what is launched now will run; None on devices without."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


_NO_SAMPLE: Final = torch.empty(0, device="cpu")


class TensorList:
    """A list of tensors that is the same in every step, split by device and work dtype, with memory made once."""

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
                # The fused kernels take one dtype at a time; elsewhere what is added up alike goes together.
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
            mine = [tensors[i].detach() for i in part.indices]
            fill = part.loading(mine)
            tables.append(self.table(part, mine if not part.keeps else None, turn, fill=fill))
        return tables + self._odd_tables(tensors, turn)

    def table(
        self,
        part: Part,
        tensors: Sequence[Tensor] | None,
        turn: int | None,
        keys: NDArray[np.int32] | None = None,
        *,
        fill: Fill | None = None,
    ) -> Table:
        """The table of one part: of the tensors given, or of what it keeps; under its own keys, or under others."""
        stream = current_stream(part.plan.device)
        table = Table((self.keys if keys is None else keys)[part.key_order], part.rows(tensors, fill), stream=stream)
        if turn is not None and part.chunks is not None:
            table.samples = part.chunks.samples(self.hist_samples, turn)
            table.sampled = np.minimum(part.plan.numels, self.hist_samples)
        elif turn is not None:
            sources = part.in_order(tensors)
            samples = [sample(t, self.hist_samples, turn) for t in sources]
            table.samples = stack_samples(samples, self.hist_samples)
            table.sampled = np.array([s.numel() for s in samples])
        return table

    def _odd_tables(self, tensors: Sequence[Tensor], turn: int | None) -> list[Table]:
        """Sparse, complex, quantized, nested and empty tensors: one by one, made dense first."""
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
        if self.empty:
            tables.append(Table(self.keys[self.empty], empty_rows(len(self.empty))))
        return tables


class Part:
    """The tensors of a list that share a device and a work dtype."""

    def __init__(self, indices: list[int], tensors: Sequence[Tensor], *, keep: bool, large: int) -> None:
        self.indices = indices
        self.keeps = keep
        device, dtype = tensors[0].device, work_dtype(tensors[0])
        self.plan = Plan([t.numel() for t in tensors], dtype, device, large=large)
        self.chunks = chunk_list(self.plan.numels.tolist(), dtype if keep else tensors[0].dtype, device)
        """The fused kernels, where there are some: they read the tensors where they lie."""
        self._shapes = [t.shape for t in tensors]
        self.updates = update_chunks(self.plan.numels.tolist(), device) if keep else None
        self.paired: dict[str, Held] = {}
        """Memory for what is multiplied with these tensors, by purpose."""
        self.key_order = np.array(indices, dtype=np.intp)[self.plan.order]
        self.partials = Partials(self.plan.num_rows, dtype) if device.type == "cpu" else None

    @cached_property
    def held(self) -> Held:
        """Memory for copies; where the fused kernels read and nothing is kept, none is ever made."""
        return Held(self.plan, self._shapes, keep_large=self.keeps)

    def loading(self, tensors: Sequence[Tensor]) -> Fill | None:
        """Copy what has to be kept, or packed to be read; on the CPU bit by bit, as it is read."""
        if self.partials is not None:
            return self.held.loading(tensors)
        if self.keeps or self.chunks is None:
            self.held.load(tensors)
        return None

    def subtracting(self, tensors: Sequence[Tensor]) -> Fill | None:
        """Take these from what is kept, in the same manner."""
        if self.partials is not None:
            return self.held.subtracting(tensors)
        self.held.subtract(tensors)
        return None

    def rows(self, tensors: Sequence[Tensor] | None, fill: Fill | None) -> Array | Tensor:
        """Sketch rows in the plan's order, on the host or on the device."""
        if self.chunks is not None:
            return self.chunks.rows(self.in_order(tensors))
        if self.partials is None:
            return device_rows(self.plan, self.plan.blocks(self.held, tensors, fill=fill))
        self.partials.run(self.plan.blocks(self.held, tensors, fill=fill))
        return combine([self.partials], self.plan.starts, self.plan.numels)

    def in_order(self, tensors: Sequence[Tensor] | None) -> list[Tensor]:
        if tensors is None:
            return [*self.held.slots, *self.held.large]
        return [tensors[i] for i in self.plan.order]
