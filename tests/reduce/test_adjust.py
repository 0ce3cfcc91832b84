"""Sketches adjusted after they were taken: unscaled, negated, and with the norm before clipping."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonde.reduce.numpy import sketch
from sonde.reduce.torch import Reducer, Table, negate_rows, scale_rows, set_raw
from sonde.schema.sketch import MAX, MIN, SUM, SUMSQ, SUMSQ_RAW
from sonde.schema.stats import Sketch


def table_of(*tensors: torch.Tensor, histogram: bool = True) -> Table:
    (table,) = Reducer().add_all("list", list(range(len(tensors))), tensors, histogram=histogram)
    return table


def numbers() -> torch.Tensor:
    x = torch.randn(400, generator=torch.Generator().manual_seed(0)) - 0.3
    x[3], x[4], x[5] = float("nan"), float("inf"), 0.0
    return x


@given(st.integers(-20, 20))
def test_scaled_sketch_is_the_sketch_of_the_scaled_tensor(ways, exponent):
    factor = 2.0**exponent
    table = table_of(numbers())
    scale_rows(table, torch.tensor(factor))
    _, rows, hist = table.resolve()
    wanted = sketch((numbers() * factor).numpy())
    ways.assert_same(rows[0], wanted.rows)
    np.testing.assert_array_equal(hist[0], wanted.hist)


def test_scaling_an_empty_row_leaves_it_empty():
    reducer = Reducer()
    (table,) = reducer.add_all("list", [1], [torch.empty(0)])
    scale_rows(table, 0.5)
    assert (table.rows[0, MIN], table.rows[0, MAX], table.rows[0, SUM]) == (np.inf, -np.inf, 0.0)


def test_negated_sketch_is_the_sketch_of_the_negated_tensor(ways):
    for x in (numbers(), numbers().abs(), torch.full((3,), float("nan")), torch.zeros(2)):
        table = table_of(x)
        negate_rows(table)
        _, rows, hist = table.resolve()
        wanted = sketch((-x).numpy())
        ways.assert_same(rows[0], wanted.rows)
        np.testing.assert_array_equal(hist[0], wanted.hist)


def test_negating_works_the_same_on_a_table_of_tensors():
    table = table_of(numbers(), histogram=False)
    as_tensor = Table(table.keys, torch.from_numpy(table.rows.copy()))
    negate_rows(table)
    negate_rows(as_tensor)
    np.testing.assert_array_equal(as_tensor.rows.numpy(), table.rows)


def test_norm_before_clipping():
    x = torch.tensor([3.0, 4.0])
    table = table_of(x * 0.1, x)
    set_raw(table, {0: torch.tensor(0.1)})
    rows = table.resolve()[1]
    clipped, other = Sketch(rows[0]), Sketch(rows[1])
    assert clipped.norm_preclip == pytest.approx(5.0)
    assert clipped.clip_factor == pytest.approx(0.1)
    assert np.isnan(rows[1, SUMSQ_RAW])
    assert (other.norm_preclip, other.clip_factor) == (pytest.approx(5.0), 1.0)


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_clipped_to_nothing_is_unknown_and_raises_nothing(factor):
    table = table_of(torch.zeros(3), torch.ones(3))
    set_raw(table, {0: factor, 1: torch.tensor(factor)})
    assert not np.isfinite(table.rows[:, SUMSQ_RAW]).any()
    assert table.rows[:, SUMSQ].tolist() == [0.0, pytest.approx(3.0)]


def test_factor_on_a_device_stays_there():
    table = table_of(torch.tensor([3.0, 4.0]), histogram=False)
    table.rows = torch.from_numpy(table.rows)
    set_raw(table, {0: torch.tensor(0.5)})
    scale_rows(table, torch.tensor(2.0))
    assert isinstance(table.rows, torch.Tensor)
    assert table.rows[0, SUMSQ] == pytest.approx(100.0)
    assert table.rows[0, SUMSQ_RAW] == pytest.approx(100.0)
