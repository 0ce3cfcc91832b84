"""Finds NaN and infinity in many tensors of a GPU with one launch, or reads nothing if a number on the device says so.

Works on bits: a value is non-finite if all bits of its exponent are set, and NaN if its mantissa is not zero. A few
programs per multiprocessor walk through all tensors; nothing waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonde.reduce.gpu.triton import beside, to_device

BLOCK: Final = 4096
"""Elements that a program tests at a time; a sample reads blocks of this size."""
_NUM_WARPS: Final = 8
_PER_PROCESSOR: Final = 2
_MAX_TABLES: Final = 16
NUM_COLUMNS: Final = 6

Row = tuple[int, int, int, int, int, int]
"""Address, number of elements, bytes of one, bits of the exponent, bits of the mantissa, and how many blocks apart the
blocks are that are read: 1 reads everything."""

_BITS: Final[dict[torch.dtype, tuple[int, int]]] = {
    torch.float64: (0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
    torch.float32: (0x7F80_0000, 0x007F_FFFF),
    torch.bfloat16: (0x7F80, 0x007F),
    torch.float16: (0x7C00, 0x03FF),
    torch.float8_e5m2: (0x7C, 0x03),
    torch.float8_e4m3fn: (0x7F, 0x7F),  # it has no infinity, and one NaN
}

_INTEGERS: Final = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def row_of(tensor: Tensor, apart: int = 1) -> Row | None:
    """The kernel's description of a tensor without gaps; None for a dtype that it does not know."""
    dtype, numel = tensor.dtype, tensor.numel()
    if dtype.is_complex:
        dtype, numel = dtype.to_real(), 2 * numel
    bits = _BITS.get(dtype)
    return None if bits is None else (tensor.data_ptr(), numel, dtype.itemsize, *bits, apart)


@triton.jit
def _codes(values, at, numel, exponent, mantissa):  # type: ignore[no-untyped-def]
    bits = tl.load(values + at, mask=at < numel, other=0)
    is_bad = (bits & exponent) == exponent
    return tl.where(is_bad, tl.where((bits & mantissa.to(bits.dtype)) != 0, 2, 1), 0)


@triton.jit(do_not_specialize=["num_tensors", "first"])  # type: ignore[untyped-decorator]
def _find(  # type: ignore[no-untyped-def]
    table, needed, found, first, num_tensors,
    COLUMNS: tl.constexpr, IS_CONDITIONAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the largest code of each tensor in `found[first + its row]`, and of all in `found[0]`."""
    is_needed = True
    if IS_CONDITIONAL:
        is_needed = tl.load(needed) > 0
    if is_needed:
        lanes = tl.arange(0, BLOCK)
        for tensor in range(num_tensors):
            row = table + tensor * COLUMNS
            address = tl.load(row)
            numel = tl.load(row + 1)
            size = tl.load(row + 2)
            exponent = tl.load(row + 3)
            mantissa = tl.load(row + 4)
            stride = tl.load(row + 5) * BLOCK
            worst = tl.zeros([BLOCK], tl.int32)
            for start in range(tl.program_id(0) * stride, numel, tl.num_programs(0) * stride):
                at = start + lanes
                # Without names for the bits: a name has the same type in all branches.
                if size == 2:
                    worst = tl.maximum(
                        worst,
                        _codes(address.to(tl.pointer_type(tl.int16)), at, numel, exponent.to(tl.int16), mantissa),
                    )
                elif size == 4:
                    worst = tl.maximum(
                        worst,
                        _codes(address.to(tl.pointer_type(tl.int32)), at, numel, exponent.to(tl.int32), mantissa),
                    )
                elif size == 8:
                    worst = tl.maximum(
                        worst, _codes(address.to(tl.pointer_type(tl.int64)), at, numel, exponent, mantissa)
                    )
                else:
                    worst = tl.maximum(
                        worst,
                        _codes(address.to(tl.pointer_type(tl.int8)), at, numel, exponent.to(tl.int8), mantissa),
                    )
            code = tl.max(worst)
            if code > 0:
                tl.atomic_max(found + first + tensor, code)
                tl.atomic_max(found, code)


@triton.jit(do_not_specialize=["numel", "place", "exponent", "mantissa"])  # type: ignore[untyped-decorator]
def _find_one(  # type: ignore[no-untyped-def]
    values, needed, found, place, numel, exponent, mantissa, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    bits = values.to(tl.pointer_type(BITS))
    if tl.load(needed) > 0:
        lanes = tl.arange(0, BLOCK)
        worst = tl.zeros([BLOCK], tl.int32)
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, tl.num_programs(0).to(tl.int64) * BLOCK):
            worst = tl.maximum(worst, _codes(bits, start + lanes, numel, exponent.to(BITS), mantissa))
        code = tl.max(worst)
        if code > 0:
            tl.atomic_max(found + place, code)


_tables: OrderedDict[tuple[torch.device, int, tuple[Row, ...]], Tensor] = OrderedDict()
"""Tables on their device. Activations usually have the same addresses in every step."""
_num_programs: dict[torch.device, int] = {}


def new_codes(num: int, device: torch.device) -> Tensor:
    """Room for the codes of `num` tensors, after the largest of them."""
    return torch.zeros(num + 1, dtype=torch.int32, device=device)


def find(rows: Sequence[Row], codes: Tensor, *, first: int = 1, needed: Tensor | None = None) -> None:
    """Put 0 (finite), 1 (infinity) or 2 (NaN) for each tensor into `codes`, from `first` on. With `needed`, nothing is
    read if its first number is 0."""
    device = codes.device
    table = _table(tuple(rows), device)
    with beside(device):
        _find[(_programs(device),)](
            table, codes if needed is None else needed, codes, first, len(rows),
            COLUMNS=NUM_COLUMNS, IS_CONDITIONAL=needed is not None, BLOCK=BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip


def find_one(tensor: Tensor, codes: Tensor, place: int, *, needed: Tensor) -> bool:
    """The same for one tensor without gaps. Returns whether its dtype is known."""
    row = row_of(tensor)
    if row is None:
        return False
    _, numel, size, exponent, mantissa, _ = row
    device = codes.device
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    with beside(device):
        _find_one[(min(_programs(device), -(-numel // BLOCK)),)](
            tensor.view(torch.uint8) if size == 1 else tensor, needed, codes, place, numel, exponent, mantissa,
            BITS=_INTEGERS[size], BLOCK=BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return True


def _table(rows: tuple[Row, ...], device: torch.device) -> Tensor:
    # On another stream the table might be read before it has arrived.
    key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0, rows
    known = _tables.get(key)
    if known is None:
        known = _tables[key] = to_device(torch.tensor(rows, dtype=torch.int64).reshape(-1), device)
        if len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return known


def _programs(device: torch.device) -> int:
    if device not in _num_programs:
        properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        _num_programs[device] = 3 if properties is None else _PER_PROCESSOR * properties.multi_processor_count
    return _num_programs[device]
