"""Sketches on a GPU at the speed of its memory: one launch reads every element of every tensor of a list once.

Three small kernels. `_partials` goes over chunks of CHUNK elements without a mask or a test per element: float32 within
a chunk. `_repair` looks at each chunk's result and does again, in float64 and with the non-finite values counted and
left out, those that held a NaN or an infinity or whose squares left float32's range. `_combine` adds a tensor's chunks
in float64. The order of all additions is fixed: the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonde.reduce.dense import flat
from sonde.schema.sketch import (
    GRAD_MOMENT,
    GRAD_SQ_OVER_V,
    GRAD_UPDATE,
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
_CHECKED: Final = 32
"""Chunks that one program looks at for what has to be done again."""
_TYPES: Final = {
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
_WIDE: Final = frozenset({torch.float64, torch.int64, torch.int32})
"""What float32 does not hold exactly is added up in float64 from the start."""


def reads(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether these kernels read this dtype: fp8 needs a GPU that has it."""
    return dtype in _TYPES and (dtype.itemsize > 1 or not dtype.is_floating_point or _capability(device) >= (8, 9))


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
def _repair(  # type: ignore[no-untyped-def]
    address, owner, offset, numel, out, num_chunks, TINY, HUGE,
    DTYPE: tl.constexpr, NARROW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * CHECKED
    looked = first + tl.arange(0, CHECKED)
    is_there = looked < num_chunks
    squares_before = tl.load(out + 4 * num_chunks + looked, mask=is_there, other=1.0)
    magnitudes_before = tl.load(out + 5 * num_chunks + looked, mask=is_there, other=1.0)
    if tl.sum(_is_bad(squares_before, magnitudes_before, TINY, HUGE)) > 0:
        for chunk in tl.range(first, tl.minimum(first + CHECKED, num_chunks)):
            squares_found = tl.load(out + 4 * num_chunks + chunk)
            magnitudes_found = tl.load(out + 5 * num_chunks + chunk)
            if _is_bad(squares_found, magnitudes_found, TINY, HUGE) > 0:
                _redo(address, owner, offset, numel, out, num_chunks, chunk, DTYPE, NARROW, CHUNK, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    partial, first, numel, rows, num_chunks,
    FIELD_N: tl.constexpr, FIELD_HIST_N: tl.constexpr,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr,
    F4: tl.constexpr, F5: tl.constexpr, FIELD_MIN: tl.constexpr, FIELD_MAX: tl.constexpr,
    NUM_FIELDS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tensor = tl.program_id(0)
    start = tl.load(first + tensor)
    end = tl.load(first + tensor + 1)
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


class ChunkList:
    """Tensors of one dtype on one GPU, cut into chunks. All memory is made once; only addresses change."""

    def __init__(self, numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device, self.num_tensors = dtype, device, len(numels)
        per_tensor = [-(-numel // CHUNK) for numel in numels]
        self.num_chunks = sum(per_tensor)
        counts = torch.tensor(per_tensor)
        firsts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(len(numels)), counts)
        offset = (torch.arange(self.num_chunks) - firsts[owner]) * CHUNK
        self.first = _to_device(firsts.to(torch.int32), device)
        self.owner = _to_device(owner.to(torch.int32), device)
        self.offset = _to_device(offset, device)
        self.numel = _to_device(torch.tensor(list(numels)), device)
        self.partial = torch.empty(_NUM_PARTIALS * self.num_chunks, dtype=torch.float64, device=device)
        self._addresses: list[int] = []
        self._address: Tensor | None = None
        self._is_aligned = False

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """(T, NUM_FIELDS) on the device. Nothing waits for it."""
        values = [flat(tensor) for tensor in tensors]
        self._find([value.data_ptr() for value in values])
        rows = torch.full((self.num_tensors, NUM_FIELDS), torch.nan, dtype=torch.float64, device=self.device)
        wide = self.dtype in _WIDE
        with torch.cuda.device(self.device):
            _partials[(self.num_chunks,)](
                self._address, self.owner, self.offset, self.numel, self.partial, self.num_chunks,
                DTYPE=_TYPES[self.dtype], WORK=tl.float64 if wide else tl.float32, ALIGNED=self._is_aligned,
                CHUNK=CHUNK, BLOCK=BLOCK, num_warps=_NUM_WARPS, num_stages=3,
            )  # fmt: skip
            _repair[(-(-self.num_chunks // _CHECKED),)](
                self._address, self.owner, self.offset, self.numel, self.partial, self.num_chunks,
                1e-300 if wide else 1e-32, 1e300 if wide else 3e38,
                DTYPE=_TYPES[self.dtype], NARROW=not wide, CHUNK=CHUNK, BLOCK=BLOCK, CHECKED=_CHECKED, num_warps=4,
            )  # fmt: skip
            combine(self.partial, self, rows)
        return rows

    def _find(self, addresses: list[int]) -> None:
        """Where the tensors lie now. Gradients made anew in each step mostly lie where they lay before."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._address = _to_device(torch.tensor(addresses), self.device)
            # A vector load from an odd address would end the user's program: every address must be a multiple of 16.
            self._is_aligned = all(address % 16 == 0 for address in addresses)


@triton.jit  # type: ignore[untyped-decorator]
def _update_partials(  # type: ignore[no-untyped-def]
    before, after, grad, exp_avg, exp_avg_sq, owner, offset, numel, out, num_chunks, floor,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HELD: tl.constexpr,
    HAS_GRAD: tl.constexpr, HAS_MOMENTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(owner + chunk)
    start = tl.load(offset + chunk)
    left = tl.load(numel + tensor) - start
    old = tl.load(before + tensor).to(tl.pointer_type(HELD)) + start
    new = tl.load(after + tensor).to(tl.pointer_type(PARAM)) + start
    gradient = tl.load(grad + tensor).to(tl.pointer_type(GRAD)) + start
    first = tl.load(exp_avg + tensor).to(tl.pointer_type(STATE)) + start
    second = tl.load(exp_avg_sq + tensor).to(tl.pointer_type(STATE)) + start
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float64)
    magnitudes = tl.zeros([BLOCK], tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    lowest_v = tl.load(floor).to(tl.float32)
    zeros = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    infs = tl.zeros([BLOCK], tl.int32)
    with_update = tl.zeros([BLOCK], tl.float32)
    with_moment = tl.zeros([BLOCK], tl.float32)
    over_v = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, CHUNK, BLOCK):
        inside = i + lanes < left
        p = tl.load(new + i + lanes, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        b = tl.load(old + i + lanes, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        u = p - b
        is_nan = u != u
        is_inf = tl.abs(u) == float("inf")
        finite = inside & (is_nan == 0) & (is_inf == 0)
        kept = tl.where(finite, u, 0.0)
        nans += is_nan.to(tl.int32)
        infs += is_inf.to(tl.int32)
        zeros += ((kept == 0) & finite).to(tl.int32)
        total += kept
        wide = kept.to(tl.float64)
        squares += wide * wide
        magnitudes += tl.abs(kept)
        lowest = tl.minimum(lowest, tl.where(finite, kept, float("inf")))
        highest = tl.maximum(highest, tl.where(finite, kept, float("-inf")))
        if HAS_GRAD:
            g = tl.load(gradient + i + lanes, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            with_update += g * u
            if HAS_MOMENTS:
                m = tl.load(first + i + lanes, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
                v = tl.load(second + i + lanes, mask=inside, other=1.0, eviction_policy="evict_first").to(tl.float32)
                with_moment += g * m
                over_v += g * g / tl.maximum(v, lowest_v)
    out += chunk
    tl.store(out, tl.sum(nans).to(tl.float64))
    tl.store(out + num_chunks, tl.sum(infs).to(tl.float64))
    tl.store(out + 2 * num_chunks, tl.sum(zeros).to(tl.float64))
    tl.store(out + 3 * num_chunks, tl.sum(total).to(tl.float64))
    tl.store(out + 4 * num_chunks, tl.sum(squares))
    tl.store(out + 5 * num_chunks, tl.sum(magnitudes).to(tl.float64))
    tl.store(out + 6 * num_chunks, tl.min(lowest).to(tl.float64))
    tl.store(out + 7 * num_chunks, tl.max(highest).to(tl.float64))
    tl.store(out + 8 * num_chunks, tl.sum(with_update).to(tl.float64))
    tl.store(out + 9 * num_chunks, tl.sum(with_moment).to(tl.float64))
    tl.store(out + 10 * num_chunks, tl.sum(over_v).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(partial, first, rows, num_chunks, FIELD: tl.constexpr, NUM_FIELDS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    tensor = tl.program_id(0)
    end = tl.load(first + tensor + 1)
    lanes = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    for i in tl.range(tl.load(first + tensor), end, LANES):
        total += tl.load(partial + i + lanes, mask=i + lanes < end, other=0.0)
    tl.store(rows + tensor * NUM_FIELDS + FIELD, tl.sum(total))


class UpdateChunks:
    """The update of a list of parameters and its paired sums, in one reading of everything that goes into them."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.chunks = ChunkList(numels, torch.float32, device)
        self.partial = torch.empty(11 * self.chunks.num_chunks, dtype=torch.float64, device=device)
        self._found: dict[str, tuple[list[int], Tensor]] = {}

    def rows(
        self,
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        grads: Sequence[Tensor] | None,
        moments: tuple[Sequence[Tensor], Sequence[Tensor]] | None,
        floor: Tensor,
    ) -> Tensor:
        """(T, NUM_FIELDS) of the update. All tensors are contiguous, of one dtype per list."""
        chunks = self.chunks
        rows = torch.full((chunks.num_tensors, NUM_FIELDS), torch.nan, dtype=torch.float64, device=chunks.device)
        old, new = self._address("before", before), self._address("after", after)
        grad = self._address("grad", grads) if grads is not None else new
        exp_avg, exp_avg_sq = (
            (self._address("exp_avg", moments[0]), self._address("exp_avg_sq", moments[1]))
            if moments is not None
            else (new, new)
        )
        with torch.cuda.device(chunks.device):
            _update_partials[(chunks.num_chunks,)](
                old, new, grad, exp_avg, exp_avg_sq, chunks.owner, chunks.offset, chunks.numel,
                self.partial, chunks.num_chunks, floor,
                PARAM=_TYPES[after[0].dtype], HELD=_TYPES[before[0].dtype],
                GRAD=_TYPES[(after if grads is None else grads)[0].dtype],
                STATE=_TYPES[(after if moments is None else moments[0])[0].dtype],
                HAS_GRAD=grads is not None, HAS_MOMENTS=moments is not None,
                CHUNK=CHUNK, BLOCK=BLOCK, num_warps=_NUM_WARPS,
            )  # fmt: skip
            combine(self.partial, chunks, rows)
            sums = ((8, GRAD_UPDATE), (9, GRAD_MOMENT), (10, GRAD_SQ_OVER_V))
            for place, field in sums[: 0 if grads is None else 1 if moments is None else 3]:
                _add_up[(chunks.num_tensors,)](
                    self.partial[place * chunks.num_chunks :], chunks.first, rows, chunks.num_chunks,
                    FIELD=field, NUM_FIELDS=NUM_FIELDS, LANES=512, num_warps=4,
                )  # fmt: skip
        return rows

    def _address(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        addresses = [tensor.data_ptr() for tensor in tensors]
        known = self._found.get(name)
        if known is None or known[0] != addresses:
            known = self._found[name] = addresses, _to_device(torch.tensor(addresses), self.chunks.device)
        return known[1]


def combine(partial: Tensor, chunks: ChunkList, rows: Tensor) -> None:
    """Add the partials of each tensor's chunks up, in float64 and in order, into its row."""
    _combine[(chunks.num_tensors,)](
        partial, chunks.first, chunks.numel, rows, chunks.num_chunks,
        FIELD_N=N, FIELD_HIST_N=HIST_N, F0=NAN, F1=INF, F2=ZERO, F3=SUM, F4=SUMSQ, F5=SUMABS,
        FIELD_MIN=MIN, FIELD_MAX=MAX, NUM_FIELDS=NUM_FIELDS, LANES=512, num_warps=4,
    )  # fmt: skip


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """Through pinned memory, so that nothing waits; torch keeps the pinned copy until the device has read it."""
    return host.pin_memory().to(device, non_blocking=True)


def warm_up(device: torch.device) -> None:
    """Compile the kernels on something tiny; raises where that does not work."""
    if torch.version.cuda is None or _capability(device) < (8, 0):
        raise RuntimeError(f"needs CUDA and compute capability 8.0, not {_capability(device)}")
    ChunkList([3], torch.float32, device).rows([torch.ones(3, device=device)])
