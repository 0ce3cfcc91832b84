"""Some rows of what is large: evenly apart, others at every turn, and nothing else read."""

from __future__ import annotations

import pytest
import torch

from sonde.reduce.sample import some_rows
from sonde.reduce.torch import Reducer, resolve_all
from sonde.schema.sketch import ZERO, N


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(7, 3), (4, 5, 6), (2, 3, 4, 5), (1000, 1)])
@pytest.mark.parametrize("count", [1, 2, 6, 7])
def test_every_row_has_its_turn_and_no_more_than_asked_for_are_read(shape, count):
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    rows = x.view(-1, shape[-1])
    seen: set[float] = set()
    for turn in range(3 * len(rows)):
        read = some_rows(x, count, turn)
        assert read.shape[-1] == shape[-1]
        assert 0 < len(read.reshape(-1, shape[-1])) <= count
        assert all(row in rows.tolist() for row in read.reshape(-1, shape[-1]).tolist())
        seen.update(read.reshape(-1, shape[-1])[:, 0].tolist())
    assert seen == set(rows[:, 0].tolist())


def test_a_permutation_is_read_in_memory_order():
    x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    read = some_rows(x, 16, turn=1)
    assert read.shape == (16, 4)
    assert read.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(50), torch.randn(()), torch.randn(0, 3), torch.randn(3, 0), torch.randn(8, 8)[:, ::2]],
    ids=["1-d", "0-d", "empty", "rows of nothing", "scattered"],
)  # fmt: skip
def test_what_has_no_rows_to_choose_from_is_left_whole(tensor):
    assert some_rows(tensor, 2, turn=0) is tensor


def test_no_graph_is_made():
    x = torch.randn(64, 4, requires_grad=True) * 2
    assert not some_rows(x, 8, turn=0).requires_grad


def test_a_container_tells_of_the_same_rows_as_its_last_child():
    reducer = Reducer(max_rows=4)
    x = torch.randn(100, 8)
    reducer.add(1, x)
    reducer.add(2, x)
    _, rows, _, _ = resolve_all(reducer.take())
    assert rows[:, N].tolist() == [32, 32]
    assert rows[0, :9].tolist() == rows[1, :9].tolist()


def test_odd_kinds_are_read_all_the_same():
    reducer = Reducer(max_rows=4)
    reducer.add(1, torch.eye(9).to_sparse())
    reducer.add(2, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    _, rows, _, _ = resolve_all(reducer.take())
    assert rows[:, N].tolist() == [81, 5]
    assert rows[:, ZERO].tolist() == [72, 0]
