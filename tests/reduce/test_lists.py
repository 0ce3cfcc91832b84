"""What a list of tensors gives to fused kernels, shown with some that only look at what they are given."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

from sonde.reduce import lists
from sonde.reduce.dense import addressable
from sonde.schema.sketch import NUM_FIELDS

GAPS = {
    "every second": lambda x: x.view(-1)[::2],
    "one of the last dimension": lambda x: x[..., 0],
    "even columns": lambda x: x[:, ::2],
    "expanded": lambda x: x[0, :1].expand(50),
    "transposed": lambda x: x.t(),
    "some columns": lambda x: x[:, 3:],
    "negated": lambda x: torch.complex(x, x).conj().imag,
    "as it is": lambda x: x,
}


@pytest.mark.parametrize("form", GAPS)
def test_from_its_address_on_lie_the_elements_of_a_tensor_and_no_others(form):
    x = GAPS[form](torch.randn(40, 30, generator=torch.Generator().manual_seed(0)))
    laid = addressable(x)
    in_memory = np.ctypeslib.as_array((ctypes.c_float * x.numel()).from_address(laid.data_ptr()))
    assert sorted(in_memory.tolist()) == sorted(x.flatten().tolist())


class Kernels:
    """As those of a GPU: they know addresses, which hold only as long as somebody keeps what lies there."""

    def __init__(self) -> None:
        self.read: list[weakref.ref[Tensor]] = []
        self.num_sampled = 0

    def rows(self, tensors: list[Tensor]) -> Tensor:
        assert all(t.is_contiguous() for t in tensors)
        self.read = [weakref.ref(t) for t in tensors]
        return torch.zeros(len(tensors), NUM_FIELDS, dtype=torch.float64)

    def samples(self, size: int, turn: int) -> Tensor:
        self.num_sampled = sum(ref() is not None for ref in self.read)
        return torch.zeros(len(self.read), size)


@pytest.mark.parametrize("keep", [False, True])
def test_what_was_read_is_still_there_when_samples_are_taken(keep, monkeypatch):
    kernels = Kernels()
    monkeypatch.setattr(lists, "chunk_list", lambda *_: kernels)
    monkeypatch.setattr(lists.native, "addresses", lambda _: None)
    monkeypatch.setattr(lists, "Partials", lambda *_: None)  # the CPU's, which a GPU has none of
    tensors = [torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(8, 6)[:, ::2]]
    listed = lists.TensorList([1, 2, 3], tensors, 16, lambda *_: None, keep=keep)
    [table] = listed.sketch(tensors, turn=0)
    assert table.samples is not None
    assert kernels.num_sampled == len(tensors)
