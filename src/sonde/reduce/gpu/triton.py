"""Sketches on a GPU at the speed of its memory: one launch reads every element of every tensor of a list once.

Three small kernels. `_partials` processes chunks of CHUNK elements without a mask or a test per element: float32 within
a chunk. `_repair` checks each chunk's result and recomputes, in float64 and with non-finite values counted and left
out, those that contain a NaN or an infinity or whose squares left float32's range. `_combine` adds a tensor's chunks in
float64. The order of all additions is fixed: the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sonde.reduce.dense import addressable
from sonde.reduce.sample import PRIME, stride_of
from sonde.schema.sketch import (
    HIST_N,
    INF,
    MAX,
    MIN,
    NAN,
    NUM_FIELDS,
    SUM,
    SUMABS,
    SUMSQ,
    ZERO,
    N,
)

CHUNK: Final = 32768
BLOCK: Final = 1024
_NUM_WARPS: Final = 8
_NUM_PARTIALS: Final = 8
_CAREFUL_BLOCK: Final = 256
_NUM_CAREFUL_WARPS: Final = 8
_CHECKED: Final = 8
"""Chunks that one program checks for repair."""
SCALE: Final = tl.constexpr(2.0**100)
"""Scales values below 1e-16, down to the smallest number, to where float32 can represent their squares."""
TYPES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
WIDE: Final = frozenset({torch.float64, torch.int64, torch.int32})
"""Types that float32 does not represent exactly are summed in float64 from the start."""


@cache
def reads(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels read this dtype: fp8 needs a GPU that supports it."""
    return dtype in TYPES and (dtype.itemsize > 1 or not dtype.is_floating_point or _capability(device) >= (8, 9))


_capabilities: dict[torch.device, tuple[int, int]] = {}


def _capability(device: torch.device) -> tuple[int, int]:
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device]


@triton.jit  # type: ignore[untyped-decorator]
def _partials(  # type: ignore[no-untyped-def]
    address, owner, offset, numel, out, num_chunks,
    DTYPE: tl.constexpr, WORK: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(owner + chunk)
    start = tl.load(offset + chunk)
    left = tl.load(numel + tensor) - start
    values = tl.load(address + tensor).to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        values = tl.multiple_of(values, 16)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WORK)
    squares = tl.zeros([BLOCK], WORK)
    magnitudes = tl.zeros([BLOCK], WORK)
    lowest = tl.full([BLOCK], float("inf"), WORK)
    highest = tl.full([BLOCK], float("-inf"), WORK)
    zeros = tl.zeros([BLOCK], tl.int32)
    if left >= CHUNK:
        for i in tl.range(0, CHUNK, BLOCK):
            x = tl.load(values + i + lanes, eviction_policy="evict_first").to(WORK)
            total += x
            squares += x * x
            magnitudes += tl.abs(x)
            lowest = tl.minimum(lowest, x)
            highest = tl.maximum(highest, x)
            zeros += (x == 0).to(tl.int32)
    else:
        for i in tl.range(0, CHUNK, BLOCK):
            inside = i + lanes < left
            x = tl.where(inside, tl.load(values + i + lanes, mask=inside).to(WORK), 0)
            total += x
            squares += x * x
            magnitudes += tl.abs(x)
            lowest = tl.minimum(lowest, tl.where(inside, x, float("inf")))
            highest = tl.maximum(highest, tl.where(inside, x, float("-inf")))
            zeros += ((x == 0) & inside).to(tl.int32)
    out += chunk
    tl.store(out, 0.0)
    tl.store(out + num_chunks, 0.0)
    tl.store(out + 2 * num_chunks, tl.sum(zeros).to(tl.float64))
    tl.store(out + 3 * num_chunks, tl.sum(total).to(tl.float64))
    tl.store(out + 4 * num_chunks, tl.sum(squares).to(tl.float64))
    tl.store(out + 5 * num_chunks, tl.sum(magnitudes).to(tl.float64))
    tl.store(out + 6 * num_chunks, tl.min(lowest).to(tl.float64))
    tl.store(out + 7 * num_chunks, tl.max(highest).to(tl.float64))


@triton.jit
def _is_bad(squares, magnitudes, TINY, HUGE):  # type: ignore[no-untyped-def]
    # A comparison with NaN is false, so a chunk with a NaN is not good. Nothing but zeros needs no repair.
    good = (squares <= HUGE) & ((squares >= TINY) | (magnitudes == 0))
    return (good == 0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _redo(  # type: ignore[no-untyped-def]
    address, owner, offset, numel, out, num_chunks, chunk,
    DTYPE: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    out += chunk
    tensor = tl.load(owner + chunk)
    start = tl.load(offset + chunk)
    left = tl.load(numel + tensor) - start
    values = tl.load(address + tensor).to(tl.pointer_type(DTYPE)) + start
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    magnitudes = tl.zeros([BLOCK], tl.float64)
    lowest = tl.full([BLOCK], float("inf"), tl.float64)
    highest = tl.full([BLOCK], float("-inf"), tl.float64)
    zeros = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    infs = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, CHUNK, BLOCK):
        inside = i + lanes < left
        x = tl.load(values + i + lanes, mask=inside)
        if NARROW:
            x = x.to(tl.float32)  # there is no conversion from 8 bits to 64
        x = tl.where(inside, x.to(tl.float64), 0)
        is_nan = x != x
        is_inf = tl.abs(x) == float("inf")
        finite = inside & (is_nan == 0) & (is_inf == 0)
        kept = tl.where(finite, x, 0.0)
        nans += is_nan.to(tl.int32)
        infs += is_inf.to(tl.int32)
        zeros += ((kept == 0) & finite).to(tl.int32)
        total += kept
        squares += kept * kept
        magnitudes += tl.abs(kept)
        lowest = tl.minimum(lowest, tl.where(finite, kept, float("inf")))
        highest = tl.maximum(highest, tl.where(finite, kept, float("-inf")))
    tl.store(out, tl.sum(nans).to(tl.float64))
    tl.store(out + num_chunks, tl.sum(infs).to(tl.float64))
    tl.store(out + 2 * num_chunks, tl.sum(zeros).to(tl.float64))
    tl.store(out + 3 * num_chunks, tl.sum(total))
    tl.store(out + 4 * num_chunks, tl.sum(squares))
    tl.store(out + 5 * num_chunks, tl.sum(magnitudes))
    tl.store(out + 6 * num_chunks, tl.min(lowest))
    tl.store(out + 7 * num_chunks, tl.max(highest))


@triton.jit  # type: ignore[untyped-decorator]
def _rescale(  # type: ignore[no-untyped-def]
    address, owner, offset, numel, out, num_chunks, chunk,
    DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The squares of a chunk in which every value is finite and below 1e-16: scaled, they fit, and nothing is lost."""
    tensor = tl.load(owner + chunk)
    start = tl.load(offset + chunk)
    left = tl.load(numel + tensor) - start
    values = tl.load(address + tensor).to(tl.pointer_type(DTYPE)) + start
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, CHUNK, BLOCK):
        inside = i + lanes < left
        x = tl.load(values + i + lanes, mask=inside).to(tl.float32)
        x = tl.where(inside, x, 0) * SCALE
        squares += x * x
    tl.store(out + 4 * num_chunks + chunk, tl.sum(squares).to(tl.float64) / SCALE / SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def _repair(  # type: ignore[no-untyped-def]
    address, owner, offset, numel, out, num_chunks, TINY, HUGE,
    DTYPE: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    # Neighbours belong to different programs: chunks to repair are usually adjacent, as rows of one table are.
    looked = tl.program_id(0) + tl.arange(0, CHECKED) * tl.num_programs(0)
    is_there = looked < num_chunks
    squares_before = tl.load(out + 4 * num_chunks + looked, mask=is_there, other=1.0)
    magnitudes_before = tl.load(out + 5 * num_chunks + looked, mask=is_there, other=1.0)
    if tl.sum(_is_bad(squares_before, magnitudes_before, TINY, HUGE)) > 0:
        for chunk in tl.range(tl.program_id(0), num_chunks, tl.num_programs(0)):
            squares_found = tl.load(out + 4 * num_chunks + chunk)
            magnitudes_found = tl.load(out + 5 * num_chunks + chunk)
            if _is_bad(squares_found, magnitudes_found, TINY, HUGE) > 0:
                if NARROW and squares_found < TINY:
                    _rescale(address, owner, offset, numel, out, num_chunks, chunk, DTYPE, CHUNK, 8 * BLOCK)
                else:
                    _redo(address, owner, offset, numel, out, num_chunks, chunk, DTYPE, NARROW, CHUNK, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partial, first, last, numel, rows, num_chunks,
    FIELD_N: tl.constexpr, FIELD_HIST_N: tl.constexpr,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr,
    F4: tl.constexpr, F5: tl.constexpr, FIELD_MIN: tl.constexpr, FIELD_MAX: tl.constexpr,
    NUM_FIELDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tensor = tl.program_id(0)
    partial += tl.program_id(1) * 8 * num_chunks
    rows += tl.program_id(1) * tl.num_programs(0) * NUM_FIELDS
    start = tl.load(first + tensor)
    end = tl.load(last + tensor)
    lanes = tl.arange(0, LANES)
    a0 = tl.zeros([LANES], tl.float64)
    a1 = tl.zeros([LANES], tl.float64)
    a2 = tl.zeros([LANES], tl.float64)
    a3 = tl.zeros([LANES], tl.float64)
    a4 = tl.zeros([LANES], tl.float64)
    a5 = tl.zeros([LANES], tl.float64)
    lowest = tl.full([LANES], float("inf"), tl.float64)
    highest = tl.full([LANES], float("-inf"), tl.float64)
    for i in tl.range(start, end, LANES):
        at = i + lanes
        inside = at < end
        a0 += tl.load(partial + at, mask=inside, other=0.0)
        a1 += tl.load(partial + num_chunks + at, mask=inside, other=0.0)
        a2 += tl.load(partial + 2 * num_chunks + at, mask=inside, other=0.0)
        a3 += tl.load(partial + 3 * num_chunks + at, mask=inside, other=0.0)
        a4 += tl.load(partial + 4 * num_chunks + at, mask=inside, other=0.0)
        a5 += tl.load(partial + 5 * num_chunks + at, mask=inside, other=0.0)
        lowest = tl.minimum(lowest, tl.load(partial + 6 * num_chunks + at, mask=inside, other=float("inf")))
        highest = tl.maximum(highest, tl.load(partial + 7 * num_chunks + at, mask=inside, other=float("-inf")))
    row = rows + tensor * NUM_FIELDS
    tl.store(row + FIELD_N, tl.load(numel + tensor).to(tl.float64))
    tl.store(row + FIELD_HIST_N, 0.0)
    tl.store(row + F0, tl.sum(a0))
    tl.store(row + F1, tl.sum(a1))
    tl.store(row + F2, tl.sum(a2))
    tl.store(row + F3, tl.sum(a3))
    tl.store(row + F4, tl.sum(a4))
    tl.store(row + F5, tl.sum(a5))
    tl.store(row + FIELD_MIN, tl.min(lowest))
    tl.store(row + FIELD_MAX, tl.max(highest))


@triton.jit  # type: ignore[untyped-decorator]
def sampled(count, apart, turn, lanes, SIZE: tl.constexpr, PRIME: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements sampled in this turn, as in `sample.sample`."""
    span = (SIZE - 1) * apart + 1
    start = tl.where(count > SIZE, (turn.to(tl.int64) * PRIME) % tl.maximum(count - span + 1, 1), 0)
    return start + lanes.to(tl.int64) * apart


@triton.jit(do_not_specialize=["turn"])  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    address, numel, stride, turn, out,
    DTYPE: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, PRIME: tl.constexpr,
):  # fmt: skip
    tensor = tl.program_id(0)
    count = tl.load(numel + tensor)
    lanes = tl.arange(0, LANES)
    at = sampled(count, tl.load(stride + tensor), turn, lanes, SIZE, PRIME)
    inside = lanes < tl.minimum(count, SIZE)
    x = tl.load(tl.load(address + tensor).to(tl.pointer_type(DTYPE)) + at, mask=inside)
    tl.store(out + tensor * SIZE + lanes, tl.where(inside, x.to(WORK), 0), mask=lanes < SIZE)


class Chunks:
    """The chunks of tensors of these sizes: which tensor each belongs to, and its offset. Computed once."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.device, self.num_tensors = device, len(numels)
        # By numpy: for so few numbers, waking torch's threads takes longer than counting.
        counts = -(-np.array(numels, np.int64) // CHUNK)
        firsts = np.concatenate([[0], counts.cumsum()])
        self.num_chunks = int(firsts[-1])
        owner = np.repeat(np.arange(len(numels)), counts)
        offset = (np.arange(self.num_chunks) - firsts[owner]) * CHUNK
        self.first = to_device(torch.from_numpy(firsts.astype(np.int32)), device)
        self.last = self.first[1:]
        self.owner = to_device(torch.from_numpy(owner.astype(np.int32)), device)
        self.offset = to_device(torch.from_numpy(offset), device)
        self.numel = to_device(torch.tensor(list(numels)), device)


class ChunkList(Chunks):
    """Tensors of one dtype on one GPU, split into chunks. All memory is allocated once; only addresses change."""

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(numels, device)
        self.dtype, self.numels = dtype, list(numels)
        self.partial = torch.empty(_NUM_PARTIALS * self.num_chunks, dtype=torch.float64, device=device)
        self._addresses: list[int] = []
        self._address: Tensor | None = None
        self._is_aligned = False
        self._strides: dict[int, Tensor] = {}

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """(T, NUM_FIELDS) on the device. Nothing waits for it."""
        values = [addressable(tensor) for tensor in tensors]
        self._find([value.data_ptr() for value in values])
        rows = torch.full((self.num_tensors, NUM_FIELDS), torch.nan, dtype=torch.float64, device=self.device)
        wide = self.dtype in WIDE
        with beside(self.device):
            _partials[(self.num_chunks,)](
                self._address, self.owner, self.offset, self.numel, self.partial, self.num_chunks,
                DTYPE=TYPES[self.dtype], WORK=tl.float64 if wide else tl.float32, ALIGNED=self._is_aligned,
                CHUNK=CHUNK, BLOCK=BLOCK, num_warps=_NUM_WARPS, num_stages=3,
            )  # fmt: skip
            _repair[(-(-self.num_chunks // _CHECKED),)](
                self._address, self.owner, self.offset, self.numel, self.partial, self.num_chunks,
                1e-300 if wide else 1e-32, 1e300 if wide else 3e38,
                DTYPE=TYPES[self.dtype], NARROW=not wide, CHUNK=CHUNK, BLOCK=_CAREFUL_BLOCK, CHECKED=_CHECKED,
                num_warps=_NUM_CAREFUL_WARPS,
            )  # fmt: skip
            combine(self.partial, self, rows)
        return rows

    def samples(self, size: int, turn: int) -> Tensor:
        """(T, size) elements of the tensors that `rows` has just read, padded with zeros."""
        if size not in self._strides:
            self._strides[size] = to_device(torch.tensor([stride_of(n, size) for n in self.numels]), self.device)
        wide = self.dtype in WIDE
        samples = torch.empty(
            (self.num_tensors, size), dtype=torch.float64 if wide else torch.float32, device=self.device
        )
        with beside(self.device):
            _gather[(self.num_tensors,)](
                self._address, self.numel, self._strides[size], turn, samples,
                DTYPE=TYPES[self.dtype], WORK=tl.float64 if wide else tl.float32, SIZE=size,
                LANES=power_of_two(size), PRIME=PRIME, num_warps=4,
            )  # fmt: skip
        return samples

    def _find(self, addresses: list[int]) -> None:
        """The current addresses of the tensors. Gradients re-created at each step usually keep their addresses."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._address = to_device(torch.tensor(addresses), self.device)
            # A vector load from an unaligned address would crash the user's program: every address must be a multiple
            # of 16.
            self._is_aligned = all(address % 16 == 0 for address in addresses)


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(partial, first, rows, num_chunks, FIELD: tl.constexpr, NUM_FIELDS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    tensor = tl.program_id(0)
    partial += tl.program_id(1) * num_chunks
    end = tl.load(first + tensor + 1)
    lanes = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    for i in tl.range(tl.load(first + tensor), end, LANES):
        total += tl.load(partial + i + lanes, mask=i + lanes < end, other=0.0)
    tl.store(rows + tensor * NUM_FIELDS + FIELD + tl.program_id(1), tl.sum(total))


def combine(partial: Tensor, chunks: Chunks, rows: Tensor, num_streams: int = 1) -> None:
    """Add the partials of each tensor's chunks, in float64 and in order, into its row; so for each stream."""
    combine_rows(partial, chunks.first, chunks.last, chunks.numel, rows, chunks.num_chunks, num_streams)


def combine_rows(
    partial: Tensor, first: Tensor, last: Tensor, numel: Tensor, rows: Tensor, num_chunks: int, num_streams: int = 1
) -> None:
    """The same for tensors whose chunks are anywhere."""
    _combine[(len(numel), num_streams)](
        partial, first, last, numel, rows, num_chunks,
        FIELD_N=N, FIELD_HIST_N=HIST_N, F0=NAN, F1=INF, F2=ZERO, F3=SUM, F4=SUMSQ, F5=SUMABS,
        FIELD_MIN=MIN, FIELD_MAX=MAX, NUM_FIELDS=NUM_FIELDS, LANES=512, num_warps=4,
    )  # fmt: skip


def add_up(partial: Tensor, chunks: Chunks, rows: Tensor, *, first_column: int, field: int, num: int) -> None:
    """Add further columns of partials into consecutive fields."""
    _add_up[(chunks.num_tensors, num)](
        partial[first_column * chunks.num_chunks :], chunks.first, rows, chunks.num_chunks,
        FIELD=field, NUM_FIELDS=NUM_FIELDS, LANES=512, num_warps=4,
    )  # fmt: skip


def power_of_two(size: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << max(size - 1, 0).bit_length()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy through pinned memory, so that nothing waits; torch keeps the pinned copy until the device has read it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def beside(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device. The CPU counts as one only when Triton interprets its kernels, as in tests."""
    # Uses torch's core: `torch.cuda.current_device` checks at every launch whether CUDA has been started.
    if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(device)


_HERE: Final = nullcontext()


def warm_up(device: torch.device) -> None:
    """Compile the kernels on a tiny input; raises if that does not work."""
    if torch.version.cuda is None or _capability(device) < (8, 0):
        raise RuntimeError(f"needs CUDA and compute capability 8.0, not {_capability(device)}")
    ChunkList([3], torch.float32, device).rows([torch.ones(3, device=device)])
