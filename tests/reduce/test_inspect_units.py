"""Numbers about units, against slow and obvious references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sonde.reduce.inspect import units
from sonde.reduce.inspect.weights import product_rank, product_ratio, stable_rank


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("shape", "dim"), [((6, 10), 1), ((4, 7, 10), 2), ((4, 10, 5), 1), ((3, 10, 4, 4), 1)])
def test_silent_units_are_those_that_are_zero_in_every_sample(shape, dim):
    x = random(*shape).relu()
    x.select(dim, 3).zero_()
    x.select(dim, 7).zero_()
    silent = units.is_silent(x, dim)
    assert silent.nonzero().flatten().tolist() == [3, 7]


def test_not_a_number_is_not_silence():
    x = torch.zeros(4, 3)
    x[0, 1] = torch.nan
    assert units.is_silent(x, 1).tolist() == [True, False, True]


def test_a_unit_that_speaks_once_in_the_window_is_not_dead():
    layer = units.SilentUnits()
    layer.add(0, torch.tensor([True, True, False]))
    assert layer.share() == pytest.approx(2 / 3)
    layer.add(0, torch.tensor([True, False, False]))
    assert layer.share() == pytest.approx(1 / 3)
    for _ in range(units.WINDOW):
        layer.add(0, torch.tensor([True, True, False]))
    assert layer.share() == pytest.approx(2 / 3)


def test_calls_of_a_shared_layer_are_told_apart():
    layer = units.SilentUnits()
    layer.add(0, torch.tensor([True, True]))
    layer.add(1, torch.tensor([False, False, False]))
    assert layer.share() == pytest.approx(2 / 5)


def test_a_layer_that_changes_its_width_starts_over():
    layer = units.SilentUnits()
    layer.add(0, torch.tensor([False, False]))
    layer.add(0, torch.tensor([True, True, True]))
    assert layer.share() == 1


def test_saturated_is_the_share_beyond_five():
    x = torch.tensor([[0.0, 5.1, -6.0, 4.9]])
    assert units.saturated(x) == 0.5


def reference_rank(x: Tensor) -> float:
    covariance = torch.cov(x.double().T, correction=0)
    return float(covariance.trace() ** 2 / (covariance @ covariance).trace())


@pytest.mark.parametrize(("rows", "width"), [(100, 8), (20, 60)])
def test_rank_is_the_participation_ratio_of_the_covariance(rows, width):
    x = random(rows, width) @ torch.diag(torch.linspace(0.1, 3, width)) + 5
    assert float(units.effective_rank(x)) == pytest.approx(reference_rank(x), rel=1e-4)


def test_rank_of_a_line_is_one_and_of_a_point_zero():
    line = torch.arange(10.0)[:, None] * torch.ones(6)
    assert float(units.effective_rank(line)) == pytest.approx(1, rel=1e-5)
    assert float(units.effective_rank(torch.ones(10, 6))) == 0


@pytest.mark.parametrize("scale", [1e-20, 1e15])
def test_rank_does_not_depend_on_the_scale(scale):
    x = random(50, 6)
    assert float(units.effective_rank(x * scale)) == pytest.approx(float(units.effective_rank(x)), rel=1e-3)


def test_rank_rows_are_spread_over_the_batch():
    x = torch.arange(8.0)[:, None, None].expand(8, 1000, 4)
    rows = units.rank_rows(x, 2)
    assert len(rows) <= units.MAX_RANK_ROWS
    assert set(rows[:, 0].tolist()) == set(range(8))


def test_batch_std_is_zero_when_the_input_makes_no_difference():
    row = random(1, 5)
    assert float(units.batch_std(row.expand(8, 5))) == pytest.approx(0, abs=1e-6)
    x = random(8, 5)
    expected = x.std(0, correction=0).mean() / x.square().mean().sqrt()
    assert float(units.batch_std(x)) == pytest.approx(float(expected), rel=1e-5)
    assert float(units.batch_std(torch.zeros(4, 3))) == 0


def test_row_spread_is_zero_for_equal_units_only():
    assert float(units.row_spread(torch.full((4, 3), 0.5))) == 0
    assert float(units.row_spread(torch.zeros(4, 3))) == 0
    w = random(6, 4)
    expected = (w - w.mean(0)).abs().max() / w.square().mean().sqrt()
    assert float(units.row_spread(w)) == pytest.approx(float(expected), rel=1e-5)


def test_samples_keep_to_their_size():
    assert units.as_rows(torch.zeros(64, 100, 50, 8), 3, 128).shape[0] <= 128
    assert units.as_rows(torch.zeros(7, 8), 1, 128).shape == (7, 8)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30)])
def test_stable_rank(shape):
    w = random(*shape) * torch.linspace(0.2, 2, shape[1])
    singular = torch.linalg.svdvals(w)
    # Power steps come from below: the estimate is never too small, and at most a little too large.
    expected = float((singular**2).sum() / singular[0] ** 2)
    assert expected * 0.999 <= float(stable_rank(w)) <= expected * 1.15
    assert float(stable_rank(torch.zeros(3, 3))) == 0


def test_rank_and_size_of_an_adapters_product():
    a, b, base = random(4, 30), random(20, 4), random(20, 30)
    singular = torch.linalg.svdvals(b @ a)
    expected = float((singular**2).sum() / singular[0] ** 2)
    assert float(product_rank(b, a)) == pytest.approx(expected, rel=0.15)
    assert float(product_ratio(b, a, base)) == pytest.approx(float((b @ a).norm() / base.norm()), rel=1e-4)
    assert float(product_rank(torch.zeros(20, 4), a)) == 0
