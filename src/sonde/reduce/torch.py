"""Torch tensors to sketches: many at once, or one at a time, on any device, without waiting for it.

`Reducer` collects the tensors of one step; `take()` returns a step's tables. A table from an accelerator is still being
copied then: `Table.resolve()` waits for it and is called on the writer thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.reduce.cpu import native
from sonde.reduce.cpu.plan import LARGE, row_blocks
from sonde.reduce.cpu.rows import ROW, Partials, combine
from sonde.reduce.dense import UnreadableError, dense, flat, is_plain, work_dtype
from sonde.reduce.gpu.availability import new_bank
from sonde.reduce.lists import TensorList, current_stream
from sonde.reduce.sample import sample, some_rows, stack_samples
from sonde.reduce.table import Table, add_zeros, negate_rows, resolve_all, scale_rows, send, set_raw
from sonde.schema.sketch import Array, empty_rows

if TYPE_CHECKING:
    from sonde.reduce.gpu.triton_single import Bank, Read

__all__ = ["Reducer", "Table", "negate_rows", "resolve_all", "scale_rows", "set_raw"]

_MAX_PENDING: Final = 4096
"""Single tensors waiting to be combined; a module called more often than this within a step is combined in between."""


@dataclass(slots=True)
class _Single:
    """One tensor's sums, waiting to be combined with the others of the step."""

    key: int
    sums: Partials | Array
    """The partials of its rows, or its finished sketch if the native kernel read it."""
    dtype: torch.dtype
    numel: int
    unstored_zeros: int
    sample: Tensor | None


class Reducer:
    """Sketches of the tensors of one step.

    `add` takes one tensor (an activation), `add_all` a list that is the same at every step (gradients, parameters).
    """

    def __init__(
        self,
        *,
        hist_samples: int = 512,
        max_rows: int | None = None,
        on_unreadable: Callable[[int, str], None] | None = None,
    ) -> None:
        self.hist_samples = hist_samples
        self.max_rows = max_rows
        """The number of rows of a single tensor to read; None: all."""
        self.on_unreadable = on_unreadable or (lambda *_: None)
        self.turn = 0
        self._singles: list[_Single] = []
        self._tables: list[Table] = []
        self._lists: dict[Hashable, tuple[Any, TensorList]] = {}
        self._banks: dict[tuple[torch.device, int], tuple[Any, Bank]] = {}
        """Tensors read one by one on a GPU, by stream."""
        self._free: dict[tuple[int, torch.dtype], list[Partials]] = {}
        self._last: tuple[weakref.ref[Tensor], int, _Single | tuple[Bank, Read]] | None = None
        self._lock = threading.RLock()
        """Hooks may fire on several threads: held for an append and a swap only, never while computing."""

    def add(self, key: int, tensor: Tensor, *, histogram: bool = False) -> None:
        """Sketch one tensor now; it may change or be freed afterwards."""
        if self._last is not None and self._add_same(key, tensor):
            return
        is_ordinary = is_plain(tensor)
        try:
            values, unstored_zeros = (tensor, 0) if is_ordinary else dense(tensor.detach())
        except UnreadableError as why:
            self.on_unreadable(key, str(why))
            return
        if self.max_rows is not None:
            values = some_rows(values, self.max_rows, self.turn)
        if not values.is_cpu:
            self._add_on_device(key, values, unstored_zeros, histogram, tensor if is_ordinary else None)
            return
        values = values.detach()
        row = native.row(values)
        sums = self._partials_of(values) if row is None else row
        taken = self._sample(values) if histogram else None
        single = _Single(key, sums, work_dtype(values), values.numel(), unstored_zeros, taken)
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
            self._singles.append(replace(same, key=key))
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
        """The cached plan for this list; rebuilt when a shape, dtype or device has changed."""
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
        return self._tables[num_tables:]

    def drop(self, tables: Sequence[Table]) -> None:
        """Remove tables from this step; those of a step that was already returned stay in it."""
        unwanted = {id(table) for table in tables}
        self._tables = [table for table in self._tables if id(table) not in unwanted]

    def take(self) -> list[Table]:
        """Return the tables of the step, and start again."""
        tables = self.cut()
        self.turn += 1
        return tables

    def cut(self) -> list[Table]:
        """The tables of the step so far; more may follow."""
        self._combine_singles()
        self._combine_banks()
        tables, self._tables = self._tables, []
        send(tables)
        return tables

    def forget(self) -> None:
        """Release all memory."""
        with self._lock:
            self._singles, self._tables, self._last = [], [], None
        self._lists, self._banks, self._free = {}, {}, {}

    def _partials_of(self, values: Tensor) -> Partials:
        num_rows, dtype = -(-values.numel() // ROW), work_dtype(values)
        try:
            partials = self._free[num_rows, dtype].pop()
        except (KeyError, IndexError):
            partials = Partials(num_rows, dtype)
        partials.run(row_blocks(flat(values), dtype))
        return partials

    def _sample(self, values: Tensor) -> Tensor:
        return sample(values, self.hist_samples, self.turn).clone()

    def _combine_singles(self) -> None:
        with self._lock:  # a hook on another thread appends to the new list
            singles, self._singles = self._singles, []
            self._last = None
        if not singles:
            return
        for wide in (False, True):
            if group := [s for s in singles if (s.dtype == torch.float64) == wide]:
                self._tables.append(self._combine(group))
        # Only what this step used is kept for the next one: with changing shapes, nothing accumulates.
        free: dict[tuple[int, torch.dtype], list[Partials]] = {}
        for partials in {id(s.sums): s.sums for s in singles if isinstance(s.sums, Partials)}.values():
            free.setdefault((partials.num_rows, partials.dtype), []).append(partials)
        self._free = free

    def _combine(self, singles: list[_Single]) -> Table:
        rows = empty_rows(len(singles))
        full = {i: s.sums for i, s in enumerate(singles) if isinstance(s.sums, Partials) and s.numel}
        if full:
            heights = [partials.num_rows for partials in full.values()]
            starts = np.concatenate([[0], np.cumsum(heights)[:-1]]).astype(np.intp)
            numel = np.array([singles[i].numel for i in full], dtype=np.int64)
            rows[list(full)] = combine(list(full.values()), starts, numel)
        for row, single in zip(rows, singles, strict=True):
            if isinstance(single.sums, np.ndarray):
                row[:] = single.sums
            add_zeros(row, single.unstored_zeros)
        table = Table(np.array([s.key for s in singles], np.int32), rows)
        samples = [s.sample if s.sample is not None else _NO_SAMPLE for s in singles]
        if any(s.sample is not None for s in singles):
            table.samples = stack_samples(samples, self.hist_samples)
            table.sampled = np.array([s.numel() for s in samples])
        return table

    def _add_on_device(
        self, key: int, values: Tensor, unstored_zeros: int, histogram: bool, original: Tensor | None
    ) -> None:
        turn = self.turn if histogram else None
        if values.numel() and (bank := self._bank(values)) is not None:
            with self._lock:  # a slot in the bank is claimed and filled at once
                if not bank.has_room(values.numel()):
                    self._combine_banks()
                    bank.grow()
                read = bank.read(key, values, unstored_zeros=unstored_zeros, turn=turn)
                if original is not None:
                    self._remember(original, (bank, read))
            return
        listed = self.list_for(("single", key), [key], [values])
        for table in listed.sketch([values], turn=turn):
            add_zeros(table.rows, unstored_zeros)
            self._tables.append(table)

    def _bank(self, values: Tensor) -> Bank | None:
        """Memory for tensors read on the current stream; None if the fused kernels cannot read it."""
        if not values.is_cuda:
            return None
        device = values.device
        # By its number: creating a stream object takes longer than all the rest here.
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


_NO_SAMPLE: Final = torch.empty(0, device="cpu")
