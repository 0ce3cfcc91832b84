"""One tensor at a time, one launch each: partial sums go into preallocated memory; one more launch computes all rows.

Used for activations, which are gone when the step ends. A chunk with a NaN or an infinity, or whose squares leave
float32's range, is read again in float64 by the same launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonde.reduce.dense import addressable
from sonde.reduce.gpu.triton import (
    CHUNK,
    TYPES,
    WIDE,
    beside,
    combine_rows,
    power_of_two,
    reads,
    sampled,
    to_device,
)
from sonde.reduce.sample import PRIME, stride_of
from sonde.schema.sketch import NUM_FIELDS

_BLOCK: Final = 1024
_CAREFUL_BLOCK: Final = 256
_NUM_WARPS: Final = 8
_MIN_CHUNKS: Final = 1 << 14
_MAX_CHUNKS: Final = 1 << 18
"""From half a billion elements, growing as needed, to eight billion; above that, rows are computed in between."""


@triton.jit(do_not_specialize=["place", "numel"])  # type: ignore[untyped-decorator]
def _single(  # type: ignore[no-untyped-def]
    values, out, place, numel, num_places, TINY, HUGE,
    DTYPE: tl.constexpr, WORK: tl.constexpr, NARROW: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * CHUNK
    left = numel - start
    values = values.to(tl.pointer_type(DTYPE)) + start
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WORK)
    squares = tl.zeros([BLOCK], WORK)
    magnitudes = tl.zeros([BLOCK], WORK)
    lowest = tl.full([BLOCK], float("inf"), WORK)
    highest = tl.full([BLOCK], float("-inf"), WORK)
    zeros = tl.zeros([BLOCK], tl.int32)
    if left >= CHUNK:
        for i in tl.range(0, CHUNK, BLOCK):
            x = tl.load(values + i + lanes).to(WORK)
            total += x
            squares += x * x
            magnitudes += tl.abs(x)
            lowest = tl.minimum(lowest, x)
            highest = tl.maximum(highest, x)
            zeros += (x == 0).to(tl.int32)
    else:
        for i in tl.range(0, left.to(tl.int32), BLOCK):
            inside = i + lanes < left
            x = tl.where(inside, tl.load(values + i + lanes, mask=inside).to(WORK), 0)
            total += x
            squares += x * x
            magnitudes += tl.abs(x)
            lowest = tl.minimum(lowest, tl.where(inside, x, float("inf")))
            highest = tl.maximum(highest, tl.where(inside, x, float("-inf")))
            zeros += ((x == 0) & inside).to(tl.int32)
    out += place + tl.program_id(0)
    square = tl.sum(squares)
    magnitude = tl.sum(magnitudes)
    # A comparison with NaN is false, so a chunk with a NaN is not good. Nothing but zeros needs no second reading.
    if (square <= HUGE) & ((square >= TINY) | (magnitude == 0)):
        tl.store(out, 0.0)
        tl.store(out + num_places, 0.0)
        tl.store(out + 2 * num_places, tl.sum(zeros).to(tl.float64))
        tl.store(out + 3 * num_places, tl.sum(total).to(tl.float64))
        tl.store(out + 4 * num_places, square.to(tl.float64))
        tl.store(out + 5 * num_places, magnitude.to(tl.float64))
        tl.store(out + 6 * num_places, tl.min(lowest).to(tl.float64))
        tl.store(out + 7 * num_places, tl.max(highest).to(tl.float64))
    else:
        _again(values, tl.minimum(left, CHUNK).to(tl.int32), out, num_places, NARROW, CAREFUL)


@triton.jit  # type: ignore[untyped-decorator]
def _again(values, left, out, num_places, NARROW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    magnitudes = tl.zeros([BLOCK], tl.float64)
    lowest = tl.full([BLOCK], float("inf"), tl.float64)
    highest = tl.full([BLOCK], float("-inf"), tl.float64)
    zeros = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    infs = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, left, BLOCK):
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
    tl.store(out + num_places, tl.sum(infs).to(tl.float64))
    tl.store(out + 2 * num_places, tl.sum(zeros).to(tl.float64))
    tl.store(out + 3 * num_places, tl.sum(total))
    tl.store(out + 4 * num_places, tl.sum(squares))
    tl.store(out + 5 * num_places, tl.sum(magnitudes))
    tl.store(out + 6 * num_places, tl.min(lowest))
    tl.store(out + 7 * num_places, tl.max(highest))


@triton.jit(do_not_specialize=["numel", "stride", "turn", "row"])  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    values, out, numel, stride, turn, row,
    DTYPE: tl.constexpr, NARROW: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, PRIME: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, LANES)
    inside = lanes < tl.minimum(numel, SIZE)
    at = sampled(numel.to(tl.int64), stride, turn, lanes, SIZE, PRIME)
    x = tl.load(values.to(tl.pointer_type(DTYPE)) + at, mask=inside)
    if NARROW:
        x = x.to(tl.float32)
    tl.store(out + row.to(tl.int64) * SIZE + lanes, tl.where(inside, x.to(tl.float64), 0.0), mask=lanes < SIZE)


_kernels: dict[tuple[object, ...], Any] = {}
"""Compiled kernels, by what they were compiled for."""


@cache
def _constants(dtype: torch.dtype) -> tuple[tuple[float, float], tuple[Any, ...]]:
    """For each dtype: the range of sums of squares in which float32 is accurate enough, and the kernel's constants."""
    wide = dtype in WIDE
    limits = (1e-300, 1e300) if wide else (1e-32, 3e38)
    return limits, (TYPES[dtype], tl.float64 if wide else tl.float32, not wide, CHUNK, _BLOCK, _CAREFUL_BLOCK)


@dataclass(slots=True)
class Read:
    """One tensor that was read: the position of its partial sums, and its sample."""

    key: int
    numel: int
    first: int
    end: int
    unstored_zeros: int = 0
    sample_row: int = -1
    sampled: int = 0


@dataclass(slots=True)
class Bank:
    """Tensors read on one stream of one GPU since the last `rows`. Memory is allocated once and reused at every
    step."""

    device: torch.device
    size: int
    stream: int | None = None
    """The number of the stream, if known: then Triton need not query it at every launch."""
    reads: list[Read] = field(default_factory=list)
    _partial: Tensor | None = None
    _num_places: int = 0
    _used: int = 0
    _samples: Tensor | None = None
    _num_samples: int = 0
    _layout: tuple[list[tuple[int, int, int]], Tensor, Tensor] | None = None
    _strides: dict[int, int] = field(default_factory=dict)

    def reads_dtype(self, dtype: torch.dtype) -> bool:
        return reads(dtype, self.device)

    def has_room(self, numel: int) -> bool:
        """Whether this tensor's chunks still fit; otherwise call `rows` first, which frees space."""
        return not self.reads or self._used + -(-numel // CHUNK) <= self._num_places

    def read(self, key: int, tensor: Tensor, *, unstored_zeros: int = 0, turn: int | None = None) -> Read:
        """Read a tensor now; it may change or be freed afterwards."""
        bits = addressable(tensor)
        dtype, numel = bits.dtype, bits.numel()
        num_chunks = -(-numel // CHUNK)
        if self._partial is None or self._used + num_chunks > self._num_places:
            self._make_room(num_chunks)
        if dtype.itemsize == 1:
            bits = bits.detach().view(torch.uint8)
        self._launch(bits, dtype, numel, num_chunks)
        read = Read(key, numel, self._used, self._used + num_chunks, unstored_zeros)
        self._used = read.end
        self.reads.append(read)
        if turn is not None:
            self._pick(read, bits, dtype, turn)
        return read

    def _launch(self, bits: Tensor, dtype: torch.dtype, numel: int, num_chunks: int) -> None:
        """Launches the compiled kernel directly if it is known: Triton takes longer to find it than to launch it."""
        limits, fixed = _constants(dtype)
        numbers = self._used, numel, self._num_places, *limits
        # The key of a compiled kernel: device, dtype, alignment, and the width of its numbers.
        form = self.device, dtype, bits.data_ptr() % 16 == 0, numel < 1 << 31, self._num_places
        known = _kernels.get(form)
        with beside(self.device):
            if known is None:
                kernel = _single[(num_chunks,)](bits, self._partial, *numbers, *fixed, num_warps=_NUM_WARPS)
                if kernel is not None and not hasattr(kernel, "result"):  # interpreted, or still being compiled
                    _kernels[form] = kernel
            else:
                known[num_chunks, 1, 1](bits, self._partial, *numbers, *fixed, stream=self.stream)

    def again(self, key: int, read: Read) -> None:
        """The same tensor under another name."""
        self.reads.append(
            Read(key, read.numel, read.first, read.end, read.unstored_zeros, read.sample_row, read.sampled)
        )

    def rows(self) -> tuple[list[Read], Tensor, Tensor | None]:
        """(T, NUM_FIELDS) of everything read, with its samples; then start again."""
        reads, self.reads = self.reads, []
        rows = torch.full((len(reads), NUM_FIELDS), torch.nan, dtype=torch.float64, device=self.device)
        firsts, numels = self._place(reads)
        assert self._partial is not None
        with beside(self.device):
            combine_rows(self._partial, firsts[0], firsts[1], numels, rows, self._num_places)
        samples = None if self._samples is None or not self._num_samples else self._samples[: self._num_samples]
        self._used, self._num_samples, self._samples = 0, 0, None
        return reads, rows, samples

    def grow(self) -> None:
        """A step did not fit: allocate more memory from the next tensor on."""
        assert not self.reads
        self._num_places = min(4 * self._num_places, _MAX_CHUNKS)
        self._partial = None

    def _place(self, reads: Sequence[Read]) -> tuple[Tensor, Tensor]:
        """The position of each tensor's chunks, on the device; usually the same as in the previous step."""
        layout = [(read.first, read.end, read.numel) for read in reads]
        if self._layout is None or self._layout[0] != layout:
            places = torch.tensor([[first for first, _, _ in layout], [end for _, end, _ in layout]], dtype=torch.int32)
            numels = torch.tensor([numel for _, _, numel in layout])
            self._layout = layout, to_device(places, self.device), to_device(numels, self.device)
        return self._layout[1], self._layout[2]

    def _make_room(self, num_chunks: int) -> None:
        assert not self.reads, "rows() must be called first"
        self._num_places = max(_MIN_CHUNKS, self._num_places, power_of_two(num_chunks))
        self._partial = torch.empty(8 * self._num_places, dtype=torch.float64, device=self.device)

    def _pick(self, read: Read, bits: Tensor, dtype: torch.dtype, turn: int) -> None:
        if self._samples is None:
            self._samples = torch.empty((64, self.size), dtype=torch.float64, device=self.device)
        elif self._num_samples == len(self._samples):
            self._samples = torch.cat([self._samples, torch.empty_like(self._samples)])
        read.sample_row, read.sampled = self._num_samples, min(read.numel, self.size)
        self._num_samples += 1
        if len(self._strides) > 4096:
            self._strides.clear()
        stride = self._strides.setdefault(read.numel, 0) or stride_of(read.numel, self.size)
        self._strides[read.numel] = stride
        with beside(self.device):
            _pick[(1,)](
                bits, self._samples, read.numel, stride, turn, read.sample_row,
                DTYPE=TYPES[dtype], NARROW=dtype not in WIDE, SIZE=self.size, LANES=power_of_two(self.size),
                PRIME=PRIME, num_warps=4,
            )  # fmt: skip
