"""The paired sums of the native kernel: gradient with update, gradient with moment, squared gradient over moment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sonde.reduce.cpu import native
from sonde.reduce.cpu.native import Act, Addresses, Pairs
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE

SEGMENT = 32768
SIZES = [1, 31, 32, 33, 63, 64, 65, 1000, SEGMENT - 1, SEGMENT, SEGMENT + 33]
FLOOR = 0.01
COLUMNS = [GRAD_UPDATE, GRAD_MOMENT, GRAD_SQ_OVER_V]


@pytest.fixture
def kernel():
    found = native.kernel()
    if found is None:
        pytest.skip("the native kernel was not built")
    return found


def some(sizes: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


def wanted(after: Tensor, before: Tensor, pairs: Pairs, which: int) -> list[np.ndarray]:
    """The products that are added up, in float64."""
    g = pairs.grads[which].double().numpy()
    update = (before - after).double().numpy()
    if pairs.moments is None:
        return [-g * update]
    first, second = (listed[which].double().numpy() for listed in pairs.moments)
    floor = float(np.broadcast_to(pairs.floor, len(pairs.grads))[which])
    return [-g * update, g * first, g * g / np.where(second < floor, floor, second)]


@pytest.mark.parametrize("act", [Act.SUBTRACT, Act.SUBTRACT_INTO])
@pytest.mark.parametrize("has_moments", [False, True])
@pytest.mark.parametrize("floor", [FLOOR, np.geomspace(1e-3, 1.0, len(SIZES))])
def test_paired_sums_are_those_by_hand(kernel, act, has_moments, floor):
    after, before, grads, first, second = (some(SIZES, seed) for seed in range(5))
    second = [v.abs() for v in second]
    pairs = Pairs(grads, (first, second) if has_moments else None, floor)
    table = Addresses(kernel, after)
    assert table.can_pair(after, pairs)
    kept = [b.clone() for b in before]
    rows = table.rows(after, kept, act, pairs)
    without = table.rows(after, [b.clone() for b in before], act)
    assert np.array_equal(rows[:, :GRAD_UPDATE], without[:, :GRAD_UPDATE], equal_nan=True)
    for which, row in enumerate(rows):
        products = wanted(after[which], before[which], pairs, which)
        for column, product in zip(COLUMNS, products, strict=False):
            assert abs(row[column] - product.sum()) <= 1e-6 * np.abs(product).sum(), (SIZES[which], column)
        assert np.isnan(row[COLUMNS[len(products) :]]).all()


@pytest.mark.parametrize("place", [0, 5, 999])
@pytest.mark.parametrize("spoilt", range(3))
def test_nonfinite_values_are_not_hidden(kernel, place, spoilt):
    after, before, grads, first, second = (some([1000, 1000], seed) for seed in range(5))
    (grads, first, second)[spoilt][0][place] = torch.nan
    row, other = Addresses(kernel, after).rows(after, before, Act.SUBTRACT, Pairs(grads, (first, second), FLOOR))
    assert np.isnan(row[COLUMNS]).tolist() == [[True, True, True], [False, True, False], [False, False, True]][spoilt]
    assert np.isfinite(other[COLUMNS]).all()


def test_bits_do_not_depend_on_threads(kernel, monkeypatch):
    monkeypatch.setattr(native, "THREADED", 1)
    after, before, grads, first, second = (some([5, 100_001, 70_000], seed) for seed in range(5))
    found = set()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        try:
            rows = Addresses(kernel, after).rows(after, before, Act.SUBTRACT, Pairs(grads, (first, second), FLOOR))
            found.add(rows.tobytes())
        finally:
            torch.set_num_threads(1)
    assert len(found) == 1


@pytest.mark.parametrize(
    "odd",
    [
        torch.randn(40, 2)[:, 0],
        torch.randn(40).bfloat16(),
        torch.randn(40).double(),
        torch.randn(39),
        torch.randn(8, 5),
    ],
)
def test_what_lies_otherwise_is_left_to_torch(kernel, odd):
    x = torch.randn(40)
    table = Addresses(kernel, [x])
    assert table.can_pair([x], Pairs([x], ([x], [x]), 0.0))
    assert not table.can_pair([x], Pairs([odd], None, 0.0))
    assert not table.can_pair([x], Pairs([x], ([x], [odd]), 0.0))
    assert not table.can_pair([odd], Pairs([x], None, 0.0))
