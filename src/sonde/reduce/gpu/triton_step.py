"""One read of parameters, gradients and optimizer states, just before the step: all their sketches, and the update.

The update is computed by the optimizer's own formula (`update_formula.py`), so that no copy of the parameters is
needed. A sample of each parameter is compared with the actual result of the step: `verify` reports the error of the
formula. As in `triton.py`, the fast kernel has no masks and does not handle NaN; chunks it cannot handle are recomputed
in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonde.reduce.gpu.triton import CHUNK, TYPES, Chunks, add_up, beside, combine, power_of_two, sampled, to_device
from sonde.reduce.gpu.update_formula import NUM_NUMBERS, UpdateFormula
from sonde.reduce.sample import PRIME, stride_of
from sonde.schema.sketch import GRAD_UPDATE, NUM_FIELDS

STREAMS: Final = ("param", "grad", "first", "second", "update")
_NUM_STREAMS: Final = 5
_NUM_COLUMNS: Final = 8 * _NUM_STREAMS + 3
_BLOCK: Final = 512
_VEC: Final = 4
_CAREFUL_BLOCK: Final = 256
_NUM_WARPS: Final = 4
_CHECKED: Final = 8
V_SCALE: Final = tl.constexpr(2.0**32)
"""Squares of second moments underflow float32; scaled by a power of two they fit, and lose nothing."""


@triton.jit  # type: ignore[untyped-decorator]
def _numbers_of(numbers, steps, scale, skipped, tensor, ADAM: tl.constexpr, ON_DEVICE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The formula's numbers for one tensor, in float64: 1 - beta2 is a small difference. See `update_formula.py`."""
    taken = tl.load(numbers + 11)
    if ON_DEVICE:
        taken = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32))).to(tl.float64)
    keep1 = tl.load(numbers + 3)
    keep2 = tl.load(numbers + 5)
    rate = tl.load(numbers + 7)
    eps = tl.load(numbers + 8)
    correction = taken * 0.0 + 1.0
    root = correction
    if ADAM:
        correction = 1.0 - tl.exp2((taken + 1.0) * tl.log2(tl.maximum(keep2, 1e-300)))
        root = tl.sqrt(1.0 / correction)
        rate = rate / (1.0 - tl.exp2((taken + 1.0) * tl.log2(tl.maximum(keep1, 1e-300))))
    happens = tl.where(tl.load(skipped) != 0, 0.0, 1.0).to(tl.float64)
    floor = tl.maximum(eps * eps * correction, 1e-37)
    return (
        tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2) * happens,
        keep1 * happens + (1.0 - happens), tl.load(numbers + 4) * happens,
        keep2 * happens + (1.0 - happens), tl.load(numbers + 6) * happens,
        rate * happens, eps, tl.load(numbers + 9), tl.load(numbers + 10),
        root, correction, floor, 1.0 / tl.load(scale).to(tl.float64), happens == 0,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _step_math(  # type: ignore[no-untyped-def]
    p, g, m, v, sign, l2, decay, keep1, add1, keep2, add2, rate, eps, with_grad, with_buffer, root, is_skipped,
    ADAM: tl.constexpr, PARAM: tl.constexpr, STATE: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """New first moment, new second moment and update of some elements, as the optimizer will compute them."""
    # A skipped step changes nothing: the numbers say so, but zero times infinity would be NaN.
    d = sign * tl.where(is_skipped, 0.0, g) + l2 * p
    new_m = keep1 * m + add1 * d
    if ADAM:
        new_v = keep2 * v + add2 * d * d
        moved = p - decay * p - rate * new_m / (tl.sqrt(new_v) * root + eps)
    else:
        new_v = v
        moved = p - rate * (with_grad * d + with_buffer * new_m)
    if PARAM.primitive_bitwidth < 64:
        moved = moved.to(PARAM).to(WORK)
    if STATE.primitive_bitwidth < 64:
        new_m = new_m.to(STATE).to(WORK)
        new_v = new_v.to(STATE).to(WORK)
    return new_m, new_v, moved - p


@triton.jit
def _fold(x, total, squares, magnitudes, lowest, highest):  # type: ignore[no-untyped-def]
    # Four neighbours are added first: within a thread, so that one register per sum is enough.
    return (
        total + tl.sum(x, 1),
        squares + tl.sum(x * x, 1),
        magnitudes + tl.sum(tl.abs(x), 1),
        tl.minimum(lowest, tl.min(x, 1)),
        tl.maximum(highest, tl.max(x, 1)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    out, num_chunks, stream, zeros, total, squares, magnitudes, lowest, highest, SCALE: tl.constexpr
):
    out += stream * 8 * num_chunks
    scale = 1.0 / SCALE
    tl.store(out, 0.0)
    tl.store(out + num_chunks, 0.0)
    tl.store(out + 2 * num_chunks, zeros.to(tl.float64))
    tl.store(out + 3 * num_chunks, tl.sum(total).to(tl.float64) * scale)
    tl.store(out + 4 * num_chunks, tl.sum(squares).to(tl.float64) * scale * scale)
    tl.store(out + 5 * num_chunks, tl.sum(magnitudes).to(tl.float64) * scale)
    tl.store(out + 6 * num_chunks, tl.min(lowest).to(tl.float64) * scale)
    tl.store(out + 7 * num_chunks, tl.max(highest).to(tl.float64) * scale)


@triton.jit  # type: ignore[untyped-decorator]
def _step_partials(  # type: ignore[no-untyped-def]
    param, grad, first, second, steps, numbers, scale, skipped, owner, offset, numel, out, num_chunks,
    ADAM: tl.constexpr, ON_DEVICE: tl.constexpr, ALIGNED: tl.constexpr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, NUMBERS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(owner + chunk)
    start = tl.load(offset + chunk)
    left = tl.load(numel + tensor) - start
    first_at = tl.load(first + tensor)
    second_at = tl.load(second + tensor)
    p_at = tl.load(param + tensor).to(tl.pointer_type(PARAM)) + start
    g_at = tl.load(grad + tensor).to(tl.pointer_type(GRAD)) + start
    m_at = first_at.to(tl.pointer_type(STATE)) + start
    v_at = second_at.to(tl.pointer_type(STATE)) + start
    if ALIGNED:
        p_at = tl.multiple_of(p_at, 16)
        g_at = tl.multiple_of(g_at, 16)
        m_at = tl.multiple_of(m_at, 16)
        v_at = tl.multiple_of(v_at, 16)
    (sign64, l2_64, decay64, keep1_64, add1_64, keep2_64, add2_64, rate64, eps64, with_grad64, with_buffer64,
     root64, correction, floor64, unscale64, is_skipped) = _numbers_of(
        numbers + tensor * NUMBERS, steps, scale, skipped, tensor, ADAM, ON_DEVICE
    )  # fmt: skip
    sign, l2, decay = sign64.to(tl.float32), l2_64.to(tl.float32), decay64.to(tl.float32)
    keep1, add1 = keep1_64.to(tl.float32), add1_64.to(tl.float32)
    keep2, add2 = keep2_64.to(tl.float32), add2_64.to(tl.float32)
    rate, eps, root = rate64.to(tl.float32), eps64.to(tl.float32), root64.to(tl.float32)
    with_grad, with_buffer = with_grad64.to(tl.float32), with_buffer64.to(tl.float32)
    floor, unscale = floor64.to(tl.float32), unscale64.to(tl.float32)
    has_first = first_at != 0
    has_second = second_at != 0
    lanes = tl.arange(0, BLOCK // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    none = tl.zeros([BLOCK // VEC], tl.float32)
    top = tl.full([BLOCK // VEC], float("inf"), tl.float32)
    p_sum, p_sq, p_abs, p_min, p_max = none, none, none, top, -top
    g_sum, g_sq, g_abs, g_min, g_max = none, none, none, top, -top
    m_sum, m_sq, m_abs, m_min, m_max = none, none, none, top, -top
    v_sum, v_sq, v_min, v_max = none, none, top, -top
    u_sum, u_sq, u_abs, u_min, u_max = none, none, none, top, -top
    with_update, with_moment, over_v = none, none, none
    # Five counters in two words; each lane counts to at most CHUNK / BLOCK * VEC, 256, so ten bits.
    zeros_a = tl.zeros([BLOCK // VEC], tl.int32)
    zeros_b = tl.zeros([BLOCK // VEC], tl.int32)
    if left >= CHUNK:
        for i in tl.range(0, CHUNK, BLOCK):
            at = i + lanes
            p = tl.load(p_at + at, eviction_policy="evict_first").to(tl.float32)
            g = tl.load(g_at + at, eviction_policy="evict_first").to(tl.float32) * unscale
            m = tl.load(m_at + at, mask=has_first, other=0.0, eviction_policy="evict_first").to(tl.float32)
            v = m
            if ADAM:
                v = tl.load(v_at + at, mask=has_second, other=0.0, eviction_policy="evict_first").to(tl.float32)
            m, v, u = _step_math(
                p, g, m, v, sign, l2, decay, keep1, add1, keep2, add2, rate, eps, with_grad, with_buffer, root,
                is_skipped, ADAM, PARAM, STATE, tl.float32,
            )  # fmt: skip
            p_sum, p_sq, p_abs, p_min, p_max = _fold(p, p_sum, p_sq, p_abs, p_min, p_max)
            g_sum, g_sq, g_abs, g_min, g_max = _fold(g, g_sum, g_sq, g_abs, g_min, g_max)
            m_sum, m_sq, m_abs, m_min, m_max = _fold(m, m_sum, m_sq, m_abs, m_min, m_max)
            u_sum, u_sq, u_abs, u_min, u_max = _fold(u, u_sum, u_sq, u_abs, u_min, u_max)
            zeros_a += tl.sum((p == 0).to(tl.int32) + (g == 0).to(tl.int32) * 1024 + (m == 0).to(tl.int32) * 1048576, 1)
            with_update += tl.sum(g * u, 1)
            with_moment += tl.sum(g * m, 1)
            if ADAM:
                w = v * V_SCALE
                v_sum += tl.sum(w, 1)
                v_sq += tl.sum(w * w, 1)
                v_min = tl.minimum(v_min, tl.min(w, 1))
                v_max = tl.maximum(v_max, tl.max(w, 1))
                zeros_b += tl.sum((u == 0).to(tl.int32) + (v == 0).to(tl.int32) * 65536, 1)
                over_v += tl.sum(g * g / tl.maximum(v, floor), 1)
            else:
                zeros_b += tl.sum((u == 0).to(tl.int32), 1)
    out += chunk
    _put(out, num_chunks, 0, tl.sum(zeros_a & 1023), p_sum, p_sq, p_abs, p_min, p_max, 1.0)
    _put(out, num_chunks, 1, tl.sum((zeros_a >> 10) & 1023), g_sum, g_sq, g_abs, g_min, g_max, 1.0)
    _put(out, num_chunks, 2, tl.sum(zeros_a >> 20), m_sum, m_sq, m_abs, m_min, m_max, 1.0)
    _put(out, num_chunks, 3, tl.sum(zeros_b >> 16), v_sum, v_sq, v_sum, v_min, v_max, V_SCALE)
    _put(out, num_chunks, 4, tl.sum(zeros_b & 65535), u_sum, u_sq, u_abs, u_min, u_max, 1.0)
    tl.store(out + 40 * num_chunks, tl.sum(with_update).to(tl.float64))
    tl.store(out + 41 * num_chunks, tl.sum(with_moment).to(tl.float64))
    tl.store(out + 42 * num_chunks, tl.sum(over_v).to(tl.float64) * correction)
    if left < CHUNK:
        tl.store(out, -1.0)  # the last chunk of a tensor: left to the careful kernel


@triton.jit  # type: ignore[untyped-decorator]
def _is_bad(out, chunk, num_chunks, STREAM: tl.constexpr, there):  # type: ignore[no-untyped-def]
    squares = tl.load(out + (STREAM * 8 + 4) * num_chunks + chunk, mask=there, other=1.0)
    magnitudes = tl.load(out + (STREAM * 8 + 5) * num_chunks + chunk, mask=there, other=1.0)
    # A comparison with NaN is false, so a chunk with a NaN is not good. Nothing but zeros needs no repair.
    low = 1e-32
    high = 3e38
    if STREAM == 3:
        low = 1e-51  # its squares were computed from scaled values
        high = 1e19
    good = (squares <= high) & ((squares >= low) | (magnitudes == 0))
    return (good == 0).to(tl.int32)


@triton.jit
def _fold_finite(x, inside, nans, infs, zeros, total, squares, magnitudes, lowest, highest):  # type: ignore[no-untyped-def]
    is_nan = (x != x) & inside
    is_inf = (tl.abs(x) == float("inf")) & inside
    finite = inside & (is_nan == 0) & (is_inf == 0)
    kept = tl.where(finite, x, 0.0)
    return (
        nans + is_nan.to(tl.int32),
        infs + is_inf.to(tl.int32),
        zeros + ((kept == 0) & finite).to(tl.int32),
        total + kept,
        squares + kept * kept,
        magnitudes + tl.abs(kept),
        tl.minimum(lowest, tl.where(finite, kept, float("inf"))),
        tl.maximum(highest, tl.where(finite, kept, float("-inf"))),
    )


@triton.jit
def _put_careful(out, num_chunks, stream, nans, infs, zeros, total, squares, magnitudes, lowest, highest):  # type: ignore[no-untyped-def]
    out += stream * 8 * num_chunks
    tl.store(out, tl.sum(nans).to(tl.float64))
    tl.store(out + num_chunks, tl.sum(infs).to(tl.float64))
    tl.store(out + 2 * num_chunks, tl.sum(zeros).to(tl.float64))
    tl.store(out + 3 * num_chunks, tl.sum(total))
    tl.store(out + 4 * num_chunks, tl.sum(squares))
    tl.store(out + 5 * num_chunks, tl.sum(magnitudes))
    tl.store(out + 6 * num_chunks, tl.min(lowest))
    tl.store(out + 7 * num_chunks, tl.max(highest))


@triton.jit  # type: ignore[untyped-decorator]
def _elements(  # type: ignore[no-untyped-def]
    param, grad, first, second, tensor, at, inside, unscale,
    ADAM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """Some elements of the four tensors, in float64; zeros if there is no state yet."""
    first_at = tl.load(first + tensor)
    second_at = tl.load(second + tensor)
    p = tl.load(tl.load(param + tensor).to(tl.pointer_type(PARAM)) + at, mask=inside, other=0.0).to(tl.float64)
    g = tl.load(tl.load(grad + tensor).to(tl.pointer_type(GRAD)) + at, mask=inside, other=0.0).to(tl.float64)
    m = tl.load(first_at.to(tl.pointer_type(STATE)) + at, mask=inside & (first_at != 0), other=0.0).to(tl.float64)
    v = m
    if ADAM:
        v = tl.load(second_at.to(tl.pointer_type(STATE)) + at, mask=inside & (second_at != 0), other=0.0)
        v = v.to(tl.float64)
    return p, g * unscale, m, v


@triton.jit  # type: ignore[untyped-decorator]
def _step_chunk(  # type: ignore[no-untyped-def]
    param, grad, first, second, steps, numbers, scale, skipped, owner, offset, numel, out, num_chunks, chunk,
    ADAM: tl.constexpr, ON_DEVICE: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr,
    NUMBERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(owner + chunk)
    start = tl.load(offset + chunk)
    end = tl.minimum(start + CHUNK, tl.load(numel + tensor))
    (sign, l2, decay, keep1, add1, keep2, add2, rate, eps, with_grad, with_buffer,
     root, correction, floor, unscale, is_skipped) = _numbers_of(
        numbers + tensor * NUMBERS, steps, scale, skipped, tensor, ADAM, ON_DEVICE
    )  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    no = tl.zeros([BLOCK], tl.int32)
    none = tl.zeros([BLOCK], tl.float64)
    top = tl.full([BLOCK], float("inf"), tl.float64)
    p0, p1, p2, p3, p4, p5, p6, p7 = no, no, no, none, none, none, top, -top
    g0, g1, g2, g3, g4, g5, g6, g7 = no, no, no, none, none, none, top, -top
    m0, m1, m2, m3, m4, m5, m6, m7 = no, no, no, none, none, none, top, -top
    v0, v1, v2, v3, v4, v5, v6, v7 = no, no, no, none, none, none, top, -top
    u0, u1, u2, u3, u4, u5, u6, u7 = no, no, no, none, none, none, top, -top
    with_update, with_moment, over_v = none, none, none
    for i in tl.range(start, end, BLOCK):
        at = i + lanes
        inside = at < end
        p, g, m, v = _elements(param, grad, first, second, tensor, at, inside, unscale, ADAM, PARAM, GRAD, STATE)
        m, v, u = _step_math(
            p, g, m, v, sign, l2, decay, keep1, add1, keep2, add2, rate, eps, with_grad, with_buffer, root,
            is_skipped, ADAM, PARAM, STATE, tl.float64,
        )  # fmt: skip
        p0, p1, p2, p3, p4, p5, p6, p7 = _fold_finite(p, inside, p0, p1, p2, p3, p4, p5, p6, p7)
        g0, g1, g2, g3, g4, g5, g6, g7 = _fold_finite(g, inside, g0, g1, g2, g3, g4, g5, g6, g7)
        m0, m1, m2, m3, m4, m5, m6, m7 = _fold_finite(m, inside, m0, m1, m2, m3, m4, m5, m6, m7)
        u0, u1, u2, u3, u4, u5, u6, u7 = _fold_finite(u, inside, u0, u1, u2, u3, u4, u5, u6, u7)
        with_update += tl.where(inside, g * u, 0.0)
        with_moment += tl.where(inside, g * m, 0.0)
        if ADAM:
            v0, v1, v2, v3, v4, v5, v6, v7 = _fold_finite(v, inside, v0, v1, v2, v3, v4, v5, v6, v7)
            over_v += tl.where(inside, g * g / tl.maximum(v, floor), 0.0)
    out += chunk
    _put_careful(out, num_chunks, 0, p0, p1, p2, p3, p4, p5, p6, p7)
    _put_careful(out, num_chunks, 1, g0, g1, g2, g3, g4, g5, g6, g7)
    _put_careful(out, num_chunks, 2, m0, m1, m2, m3, m4, m5, m6, m7)
    _put_careful(out, num_chunks, 3, v0, v1, v2, v3, v4, v5, v6, v7)
    _put_careful(out, num_chunks, 4, u0, u1, u2, u3, u4, u5, u6, u7)
    tl.store(out + 40 * num_chunks, tl.sum(with_update))
    tl.store(out + 41 * num_chunks, tl.sum(with_moment))
    tl.store(out + 42 * num_chunks, tl.sum(over_v) * correction)


@triton.jit  # type: ignore[untyped-decorator]
def _step_repair(  # type: ignore[no-untyped-def]
    param, grad, first, second, steps, numbers, scale, skipped, owner, offset, numel, out, num_chunks,
    ADAM: tl.constexpr, ON_DEVICE: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr,
    NUMBERS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    # Neighbours belong to different programs, as in `triton._repair`.
    looked = tl.program_id(0) + tl.arange(0, CHECKED) * tl.num_programs(0)
    there = looked < num_chunks
    bad = (tl.load(out + looked, mask=there, other=0.0) < 0).to(tl.int32)
    bad |= _is_bad(out, looked, num_chunks, 0, there)
    bad |= _is_bad(out, looked, num_chunks, 1, there)
    bad |= _is_bad(out, looked, num_chunks, 2, there)
    bad |= _is_bad(out, looked, num_chunks, 4, there)
    if ADAM:
        bad |= _is_bad(out, looked, num_chunks, 3, there)
    if tl.sum(bad) > 0:
        for chunk in tl.range(tl.program_id(0), num_chunks, tl.num_programs(0)):
            if tl.sum(tl.where(looked == chunk, bad, 0)) > 0:
                _step_chunk(
                    param, grad, first, second, steps, numbers, scale, skipped, owner, offset, numel, out,
                    num_chunks, chunk, ADAM, ON_DEVICE, PARAM, GRAD, STATE, NUMBERS, CHUNK, BLOCK,
                )  # fmt: skip


@triton.jit(do_not_specialize=["turn"])  # type: ignore[untyped-decorator]
def _step_samples(  # type: ignore[no-untyped-def]
    param, grad, first, second, steps, numbers, scale, skipped, numel, stride, turn, out, num_tensors,
    ADAM: tl.constexpr, ON_DEVICE: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr,
    NUMBERS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, PRIME: tl.constexpr,
):  # fmt: skip
    """The same elements of each of the five streams: for histograms, and for the comparison after the step."""
    tensor = tl.program_id(0)
    count = tl.load(numel + tensor)
    apart = tl.load(stride + tensor)
    (sign, l2, decay, keep1, add1, keep2, add2, rate, eps, with_grad, with_buffer,
     root, _correction, _floor, unscale, is_skipped) = _numbers_of(
        numbers + tensor * NUMBERS, steps, scale, skipped, tensor, ADAM, ON_DEVICE
    )  # fmt: skip
    lanes = tl.arange(0, LANES)
    inside = lanes < tl.minimum(count, SIZE)
    at = sampled(count, apart, turn, lanes, SIZE, PRIME)
    p, g, m, v = _elements(param, grad, first, second, tensor, at, inside, unscale, ADAM, PARAM, GRAD, STATE)
    m, v, u = _step_math(
        p, g, m, v, sign, l2, decay, keep1, add1, keep2, add2, rate, eps, with_grad, with_buffer, root,
        is_skipped, ADAM, PARAM, STATE, tl.float64,
    )  # fmt: skip
    out += tensor * SIZE + lanes
    kept = lanes < SIZE
    each = num_tensors * SIZE
    tl.store(out, tl.where(inside, p, 0.0).to(tl.float32), mask=kept)
    tl.store(out + each, tl.where(inside, g, 0.0).to(tl.float32), mask=kept)
    tl.store(out + 2 * each, tl.where(inside, m, 0.0).to(tl.float32), mask=kept)
    tl.store(out + 3 * each, tl.where(inside, v, 0.0).to(tl.float32), mask=kept)
    tl.store(out + 4 * each, tl.where(inside, u, 0.0).to(tl.float32), mask=kept)


@triton.jit(do_not_specialize=["turn"])  # type: ignore[untyped-decorator]
def _step_verify(  # type: ignore[no-untyped-def]
    param, numel, stride, turn, samples, out, num_tensors,
    PARAM: tl.constexpr, EPSILON: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, PRIME: tl.constexpr,
):  # fmt: skip
    """The distance of the sampled parameters from the formula's prediction: squared error, and squared error
    allowed."""
    tensor = tl.program_id(0)
    count = tl.load(numel + tensor)
    lanes = tl.arange(0, LANES)
    inside = lanes < tl.minimum(count, SIZE)
    at = sampled(count, tl.load(stride + tensor), turn, lanes, SIZE, PRIME)
    now = tl.load(tl.load(param + tensor).to(tl.pointer_type(PARAM)) + at, mask=inside, other=0.0).to(tl.float64)
    samples += tensor * SIZE + lanes
    before = tl.load(samples, mask=inside, other=0.0).to(tl.float64)
    update = tl.load(samples + 4 * num_tensors * SIZE, mask=inside, other=0.0).to(tl.float64)
    moved = now - before
    wrong = moved - update
    known = (moved == moved) & (update == update) & (tl.abs(moved) != float("inf")) & (tl.abs(update) != float("inf"))
    wrong = tl.where(known, wrong, 0.0)
    moved = tl.where(known, moved, 0.0)
    rounding = tl.where(known, EPSILON * tl.maximum(tl.abs(now), tl.abs(before)), 0.0)
    tl.store(out + 2 * tensor, tl.sum(wrong * wrong))
    tl.store(out + 2 * tensor + 1, 1e-6 * tl.sum(moved * moved) + tl.sum(rounding * rounding))


_IN_MEMORY: Final = ("param", "grad", "first", "second")
"""Streams that are read; the update is computed."""


class StepChunks:
    """Parameters of one dtype on one GPU, with their gradients and states. All memory is allocated once."""

    def __init__(self, numels: Sequence[int], device: torch.device, *, size: int) -> None:
        self.chunks, self.size = Chunks(numels, device), size
        self.stride = to_device(torch.tensor([stride_of(numel, size) for numel in numels]), device)
        self.partial = torch.empty(_NUM_COLUMNS * self.chunks.num_chunks, dtype=torch.float64, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self.zero = torch.zeros((), dtype=torch.float32, device=device)
        self._tables: dict[str, tuple[list[Any], Tensor]] = {}
        self._is_aligned: dict[str, bool] = {}

    def rows(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], rule: UpdateFormula, turn: int
    ) -> tuple[Tensor, Tensor]:
        """(5, T, NUM_FIELDS) sketches and (5, T, size) samples of the STREAMS. Nothing waits for them."""
        chunks, num = self.chunks, self.chunks.num_tensors
        state = next((t.dtype for t in (*rule.first, *rule.second) if t is not None), params[0].dtype)
        tensors = (
            self._addresses("param", params), self._addresses("grad", grads),
            self._addresses("first", rule.first), self._addresses("second", rule.second),
            self._addresses("taken", rule.taken or ()), self._numbers(rule.numbers),
            self.one if rule.grad_scale is None else rule.grad_scale,
            self.zero if rule.found_inf is None else rule.found_inf,
        )  # fmt: skip
        kinds = {
            "ADAM": rule.family == "adam", "ON_DEVICE": rule.taken is not None, "PARAM": TYPES[params[0].dtype],
            "GRAD": TYPES[grads[0].dtype], "STATE": TYPES[state], "NUMBERS": NUM_NUMBERS,
        }  # fmt: skip
        rows = torch.full((_NUM_STREAMS, num, NUM_FIELDS), torch.nan, dtype=torch.float64, device=chunks.device)
        samples = torch.empty((_NUM_STREAMS, num, self.size), dtype=torch.float32, device=chunks.device)
        with beside(chunks.device):
            _step_partials[(chunks.num_chunks,)](
                *tensors, chunks.owner, chunks.offset, chunks.numel, self.partial, chunks.num_chunks, **kinds,
                ALIGNED=all(self._is_aligned[name] for name in _IN_MEMORY), CHUNK=CHUNK, BLOCK=_BLOCK,
                VEC=_VEC, num_warps=_NUM_WARPS,
            )  # fmt: skip
            _step_repair[(-(-chunks.num_chunks // _CHECKED),)](
                *tensors, chunks.owner, chunks.offset, chunks.numel, self.partial, chunks.num_chunks, **kinds,
                CHUNK=CHUNK, BLOCK=_CAREFUL_BLOCK, CHECKED=_CHECKED, num_warps=8,
            )  # fmt: skip
            combine(self.partial, chunks, rows, num_streams=_NUM_STREAMS)
            num_sums = 3 if rule.family == "adam" else 2 if rule.states else 1
            add_up(self.partial, chunks, rows[4], first_column=8 * _NUM_STREAMS, field=GRAD_UPDATE, num=num_sums)
            _step_samples[(num,)](
                *tensors, chunks.numel, self.stride, turn, samples, num, **kinds,
                SIZE=self.size, LANES=power_of_two(self.size), PRIME=PRIME, num_warps=4,
            )  # fmt: skip
        return rows, samples

    def verify(self, params: Sequence[Tensor], samples: Tensor, turn: int) -> Tensor:
        """(T, 2): squared error of the sampled updates, and the part of it that rounding explains."""
        num, dtype = self.chunks.num_tensors, params[0].dtype
        out = torch.empty((num, 2), dtype=torch.float64, device=self.chunks.device)
        with beside(self.chunks.device):
            _step_verify[(num,)](
                self._addresses("param", params), self.chunks.numel, self.stride, turn, samples, out, num,
                PARAM=TYPES[dtype], EPSILON=torch.finfo(dtype).eps, SIZE=self.size, LANES=power_of_two(self.size),
                PRIME=PRIME, num_warps=4,
            )  # fmt: skip
        return out

    def _addresses(self, name: str, tensors: Sequence[Tensor | None]) -> Tensor:
        addresses = [0 if t is None else t.data_ptr() for t in tensors] or [0]
        known = self._tables.get(name)
        table = self._table(name, addresses, torch.int64)
        if known is None or known[1] is not table:
            self._is_aligned[name] = all(address % 16 == 0 for address in addresses)
        return table

    def _numbers(self, numbers: list[list[float]]) -> Tensor:
        return self._table("numbers", numbers, torch.float64)

    def _table(self, name: str, values: list[Any], dtype: torch.dtype) -> Tensor:
        """Our numbers on the device, copied there when they have changed."""
        known = self._tables.get(name)
        if known is None or known[0] != values:
            known = self._tables[name] = values, to_device(torch.tensor(values, dtype=dtype), self.chunks.device)
        return known[1]
