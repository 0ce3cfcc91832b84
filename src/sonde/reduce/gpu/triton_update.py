"""The update of parameters of which a copy was kept: one read of everything it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonde.reduce.gpu.triton import BLOCK, CHUNK, TYPES, Chunks, add_up, beside, combine, to_device
from sonde.schema.sketch import GRAD_UPDATE, NUM_FIELDS

_NUM_WARPS: Final = 8


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
    lowest_v = tl.load(floor + tensor)
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


class UpdateChunks:
    """The update of a list of parameters and its paired sums, in one read of everything they depend on."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.chunks = Chunks(numels, device)
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
        """(T, NUM_FIELDS) of the update. All tensors are contiguous, of one dtype per list; `floor` is float32, one for
        each of them."""
        chunks = self.chunks
        rows = torch.full((chunks.num_tensors, NUM_FIELDS), torch.nan, dtype=torch.float64, device=chunks.device)
        old, new = self._address("before", before), self._address("after", after)
        grad = self._address("grad", grads) if grads is not None else new
        exp_avg, exp_avg_sq = (
            (self._address("exp_avg", moments[0]), self._address("exp_avg_sq", moments[1]))
            if moments is not None
            else (new, new)
        )
        with beside(chunks.device):
            _update_partials[(chunks.num_chunks,)](
                old, new, grad, exp_avg, exp_avg_sq, chunks.owner, chunks.offset, chunks.numel,
                self.partial, chunks.num_chunks, floor,
                PARAM=TYPES[after[0].dtype], HELD=TYPES[before[0].dtype],
                GRAD=TYPES[(after if grads is None else grads)[0].dtype],
                STATE=TYPES[(after if moments is None else moments[0])[0].dtype],
                HAS_GRAD=grads is not None, HAS_MOMENTS=moments is not None,
                CHUNK=CHUNK, BLOCK=BLOCK, num_warps=_NUM_WARPS,
            )  # fmt: skip
            combine(self.partial, chunks, rows)
            if grads is not None:
                num = 1 if moments is None else 3
                add_up(self.partial, chunks, rows, first_column=8, field=GRAD_UPDATE, num=num)
        return rows

    def _address(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        addresses = [tensor.data_ptr() for tensor in tensors]
        known = self._found.get(name)
        if known is None or known[0] != addresses:
            known = self._found[name] = addresses, to_device(torch.tensor(addresses), self.chunks.device)
        return known[1]
