"""The fused CPU kernel of `native.c`, if it was built and works; otherwise torch is used, and only speed differs.

It is loaded once. `SONDE_NATIVE=0` in the environment disables it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.display import print_line
from sonde.reduce.dense import flat
from sonde.reduce.numpy import sketch
from sonde.schema.sketch import GRAD_SQ_OVER_V, GRAD_UPDATE, NUM_FIELDS, Array, empty_rows

ABI: Final = 3
FILE: Final = Path(__file__).with_name("_native.so")
VARIABLE: Final = "SONDE_NATIVE"
CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
NUM_SUMS: Final = 9
"""The fields of a row that the kernel fills: n to max."""
THREADED: Final = 1 << 18
"""Number of elements from which threads save more time than waking them costs. All of torch's threads or none: its
runtime ends those that are left out, and would have to start them again for torch."""

_log = logging.getLogger("sonde")
_ORDINARY: Final = frozenset({Tensor, torch.nn.Parameter})
_EMPTY: Final = empty_rows(1)


class Act(IntEnum):
    """The work to do on a tensor while it is read."""

    SKETCH = 0
    COPY = 1
    """kept = x"""
    SUBTRACT = 2
    """The sketch of kept - x, which is not stored."""
    SUBTRACT_INTO = 3
    """The same, and kept -= x."""


# Columns of the table that describes tensors to the kernel, one row each; _FIRST_SEGMENT is its own. _FLOOR is a
# float64 in the place of an integer.
_SOURCE, _KEPT, _NUMEL, _DTYPE, _ACT, _FIRST_SEGMENT, _GRAD, _FIRST_MOMENT, _SECOND_MOMENT, _FLOOR = range(10)
_NUM_COLUMNS: Final = 10


class Pairs(NamedTuple):
    """Tensors that are multiplied with an update, in its order: gradients, and Adam's moments if there are any."""

    grads: Sequence[Tensor]
    moments: tuple[Sequence[Tensor], Sequence[Tensor]] | None
    floor: float | Array
    """Lower limit of a second moment: one for each tensor, or one for all."""


class Library:
    """The kernel, loaded and tested. Holds no memory: several threads may call it at once."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        library.sonde_native_abi.restype = ctypes.c_int64
        found = library.sonde_native_abi()
        if found != ABI:
            raise OSError(f"{file.name} has interface version {found}; version {ABI} is needed")
        self._rows: Any = library.sonde_native_rows
        self._rows.restype = ctypes.c_int64
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._rows.argtypes = [pointer, number, pointer, number, pointer, number]
        self._parallel = _openmp()
        _try_out(self)

    def fill(self, rows: Array, tensors: Any, num_elements: int) -> None:
        """The first fields of these rows, from a table of addresses (the columns above)."""
        num_threads = torch.get_num_threads() if num_elements >= THREADED else 1
        if self._rows(tensors, len(rows), rows.ctypes.data, NUM_FIELDS, self._parallel, num_threads):
            raise MemoryError(f"no memory for the sums of {num_elements} elements")

    def row(self, tensor: Tensor) -> Array:
        """The row of one tensor of a dtype in CODES."""
        source = tensor if _is_direct(tensor) else _laid_out(tensor, (tensor.dtype, tensor.numel()))
        rows, numel = _EMPTY.copy(), tensor.numel()
        table = (ctypes.c_int64 * _NUM_COLUMNS)(_address(source), 0, numel, CODES[tensor.dtype], Act.SKETCH)
        self.fill(rows, table, numel)
        return rows[0]  # type: ignore[no-any-return]


class Addresses:
    """The addresses of the tensors in a list, and the memory for copies of them."""

    def __init__(self, library: Library, tensors: Sequence[Tensor]) -> None:
        self._library = library
        self._forms = [(t.dtype, t.numel()) for t in tensors]
        self._table = np.zeros((len(tensors), _NUM_COLUMNS), np.int64)
        self._table[:, _NUMEL] = [numel for _, numel in self._forms]
        self._table[:, _DTYPE] = [CODES[dtype] for dtype, _ in self._forms]
        self._num_elements = int(self._table[:, _NUMEL].sum())

    def can_pair(self, tensors: Sequence[Tensor], pairs: Pairs) -> bool:
        """Whether the kernel can read all of them: the same elements, contiguous and in float32."""
        others = [pairs.grads, *(pairs.moments or ())]
        return all(
            (tensor.dtype, tensor.numel()) == form
            and all(t.dtype is torch.float32 and t.shape == tensor.shape and _is_direct(t) for t in (tensor, *paired))
            for tensor, form, *paired in zip(tensors, self._forms, *others, strict=True)
        )

    def rows(
        self,
        tensors: Sequence[Tensor],
        kept: Sequence[Tensor] | None = None,
        act: Act = Act.SKETCH,
        pairs: Pairs | None = None,
    ) -> Array:
        """Sketch the same number of tensors of the same sizes. `kept` is contiguous and in the work dtype. With
        `pairs`, if it `can_pair`, also the paired sums of the update."""
        # Until the call is over these hold the memory that is pointed to, and no other thread has this table.
        sources = list(tensors)
        table = self._table.copy()
        table[:, _ACT] = act
        if kept is not None:
            table[:, _KEPT] = [_address(t) for t in kept]
        for place, (tensor, form) in enumerate(zip(tensors, self._forms, strict=True)):
            if _is_direct(tensor) and (tensor.dtype, tensor.numel()) == form:
                continue
            if kept is None:
                sources[place] = _laid_out(tensor, form)
            else:
                sources[place] = _by_torch(tensor.detach(), kept[place], act)
                table[place, _DTYPE], table[place, _ACT] = CODES[kept[place].dtype], Act.SKETCH
        table[:, _SOURCE] = [_address(t) for t in sources]
        if pairs is not None:
            for column, listed in enumerate([pairs.grads, *(pairs.moments or ())], _GRAD):
                table[:, column] = [_address(t) for t in listed]
            table[:, _FLOOR] = np.asarray(pairs.floor, np.float64).view(np.int64)
        rows = empty_rows(len(sources))
        self._library.fill(rows, table.ctypes.data, self._num_elements)
        return rows


def addresses(tensors: Sequence[Tensor]) -> Addresses | None:
    """For a list of plain tensors on one device; None if the kernel cannot read them."""
    library = kernel() if tensors[0].device.type == "cpu" else None
    if library is None or not all(t.dtype in CODES for t in tensors):
        return None
    return Addresses(library, tensors)


def row(tensor: Tensor) -> Array | None:
    """The sketch of one plain tensor on the CPU; None if the kernel cannot read it."""
    library = kernel()
    return None if library is None or tensor.dtype not in CODES else library.row(tensor)


@cache
def kernel() -> Library | None:
    """The kernel, or None."""
    if os.environ.get(VARIABLE, "1").strip().lower() in ("0", "off", "false", "no"):
        return None
    if not FILE.is_file():
        _log.debug("the native CPU kernel was not built; torch is used instead")
        return None
    try:
        return Library(FILE)
    except Exception as error:  # noqa: BLE001 - another machine's, another version's, a broken one: many causes, one answer
        why = f"{type(error).__name__}: {error}"
        print_line(f"sonde: warning: the native CPU kernel does not work here; torch is used instead ({why})")
        return None


def _is_direct(tensor: Tensor) -> bool:
    """Whether its elements can be read one after another from its address. The address of a subclass may be invalid."""
    return type(tensor) in _ORDINARY and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def _address(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    if not address and tensor.numel():  # a freed storage, which would crash torch
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no memory")
    return address


def _laid_out(tensor: Tensor, form: tuple[torch.dtype, int]) -> Tensor:
    """The same values in some order, contiguous; a copy only if they are not."""
    tensor, (dtype, numel) = tensor.detach(), form
    if tensor.numel() != numel:
        raise ValueError(f"a tensor that had {numel} elements has {tensor.numel()} now")
    if type(tensor) in _ORDINARY and tensor.dtype is dtype and tensor.is_cpu:
        return flat(tensor.resolve_neg()).contiguous()
    return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)


def _by_torch(tensor: Tensor, kept: Tensor, act: Act) -> Tensor:
    """The copy is in element order, which torch finds for any tensor. The copy is then read."""
    return kept.copy_(tensor) if act is Act.COPY else kept.sub_(tensor)


def _openmp() -> int | None:
    """The start of a parallel region of the OpenMP runtime that torch has loaded: its threads, and no others."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def _try_out(library: Library) -> None:
    """Check sums that are exact, without and with a NaN, for each act and each dtype. No torch: its current mode must
    not affect the result."""
    plain = np.arange(600.0) % 7 - 2
    plain[[40, 90]] = 9, -8  # extremes for the vector loop to find; the last few elements are outside of it
    odd = plain.copy()
    odd[[3, 100, 599]] = np.nan, np.inf, -np.inf
    for code in CODES.values():
        for act in Act:
            sources = [_as_stored(values, code) for values in (plain, odd)]
            kept = [np.full(600, 3, np.float64 if code == CODES[torch.float64] else np.float32) for _ in sources]
            places = [(s.ctypes.data, k.ctypes.data) for s, k in zip(sources, kept, strict=True)]
            table = np.array([[*place, 600, code, act, 0, 0, 0, 0, 0] for place in places], np.int64)
            rows = empty_rows(2)
            library.fill(rows, table.ctypes.data, 1200)
            wanted = [values if act <= Act.COPY else 3 - values for values in (plain, odd)]
            left = wanted if act in (Act.COPY, Act.SUBTRACT_INTO) else [np.full(600, 3)] * 2
            expected = np.stack([sketch(values, histogram=False).rows for values in wanted])
            if not np.array_equal(rows[:, :NUM_SUMS], expected[:, :NUM_SUMS]) or not np.array_equal(
                kept, left, equal_nan=True
            ):
                raise OSError(f"it gets {act.name} of dtype {code} wrong")
    _try_out_pairs(library)


def _try_out_pairs(library: Library) -> None:
    kept, source, grad, first, second = (
        (np.arange(600.0) * factor % 7 - 2).astype(np.float32) for factor in (1, 3, 5, 2, 4)
    )
    second = 2 ** np.abs(second)
    for act in (Act.SUBTRACT, Act.SUBTRACT_INTO):
        held = kept.copy()
        at = [a.ctypes.data for a in (source, held, grad, first, second)]
        table = np.array([*at[:2], 600, CODES[torch.float32], act, 0, *at[2:], 0], np.int64)
        table[_FLOOR:] = np.array([4.0]).view(np.int64)
        rows = empty_rows(1)
        library.fill(rows, table.ctypes.data, 600)
        expected = [grad @ (source - kept), grad @ first, (grad * grad / np.maximum(second, 4)).sum()]
        if rows[0, GRAD_UPDATE : GRAD_SQ_OVER_V + 1].tolist() != [float(number) for number in expected]:
            raise OSError(f"it gets paired sums of {act.name} wrong")


def _as_stored(values: Array, code: int) -> NDArray[Any]:
    if code == CODES[torch.bfloat16]:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({CODES[torch.float32]: "f4", CODES[torch.float16]: "f2", CODES[torch.float64]: "f8"}[code])
