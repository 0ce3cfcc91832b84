"""Histograms: exact for small tensors, an unbiased estimate from a rotating sample for large ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonde.reduce.exponents import histograms, places
from sonde.reduce.numpy import sketch
from sonde.reduce.sample import sample, stack_samples
from sonde.reduce.torch import Reducer
from sonde.schema.sketch import HIST_N, NUM_BINS, empty_rows

pytestmark = pytest.mark.usefixtures("each_kernel")


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(0, 10_000))
def test_sample_has_the_size_asked_for_and_stays_inside(numel, size, turn):
    taken = sample(torch.arange(numel), size, turn)
    assert taken.numel() == min(size, numel)
    assert len(taken.unique()) == taken.numel()


@given(st.integers(1, 20), st.integers(1, 40))
def test_every_element_has_its_turn(times, size):
    # Sizes that are products of small primes are the usual ones: 3 * 512 must rotate too.
    numel = times * size
    seen = torch.zeros(numel, dtype=torch.bool)
    for turn in range(2 * numel):
        seen[sample(torch.arange(numel), size, turn)] = True
    assert seen.all()


@pytest.mark.parametrize("times", [2, 3, 23, 69, 587])
def test_next_turn_takes_another_sample(times):
    x = torch.arange(512 * times)
    assert not torch.equal(sample(x, 512, 0), sample(x, 512, 1))


def test_columns_of_a_matrix_are_all_sampled():
    # A stride that divides the row length would see the same columns for ever.
    columns = sample(torch.arange(1024).repeat(1024), 512, 0)
    assert len(columns.unique()) > 300


@given(st.integers(0, 1 << 31), st.integers(1, 600))
def test_places_for_a_compiler_are_all_different_and_inside(numel, size):
    taken = places(numel, size)
    assert len(np.unique(taken)) == min(numel, size)
    assert numel == 0 or (taken.min() >= 0 and taken.max() < numel)


@pytest.mark.parametrize("columns", [3, 64, 96, 512, 1024])
def test_places_for_a_compiler_meet_the_columns_of_a_matrix(columns):
    assert len(np.unique(places(1024 * columns, 512) % columns)) > 0.3 * min(columns, 512)


@given(st.integers(0, 512), st.integers(0, 100))
def test_exact_when_all_elements_fit(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.exp2(
        torch.randint(-60, 30, (size,), generator=generator).float()
    )
    x[::5] = 0.0
    if size > 3:
        x[3] = float("inf")
    reducer = Reducer(hist_samples=512)
    reducer.add(1, x, histogram=True)
    reducer.add_all("list", [2], [x], histogram=True)
    wanted = sketch(x.numpy())
    for table in reducer.take():
        _, rows, hist = table.resolve()
        if size:
            np.testing.assert_array_equal(hist[0], wanted.hist)
            assert rows[0, HIST_N] == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.complex64], ids=str)
@pytest.mark.parametrize("way", ["add", "add_all"])
def test_histogram_adds_up_to_the_finite_elements_that_are_not_zero(ways, way, dtype):
    x = torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 100
    x[::3] = 0.0
    if dtype.is_floating_point:
        x[1] = float("nan")
        x[4] = float("inf")
    found = ways.rows(way, [x.to(dtype)], histogram=True)[0]
    expected = found.n - found.nan - found.inf - found.zero
    assert found.hist.sum() == pytest.approx(expected, rel=1e-12)
    assert found.rows[HIST_N] == 512


def test_sparse_gradient_has_a_histogram_too(ways):
    x = torch.zeros(100, 100)
    x[3, 4], x[7, 8] = 1.0, 0.25
    for way in ways.names:
        found = ways.rows(way, [x.to_sparse()], histogram=True)[0]
        assert found.hist[48] == found.hist[46] == 1
        assert found.hist.sum() == 2


def test_sampled_histogram_is_close_to_the_true_one():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    wanted = sketch(x.numpy()).hist / 200_000
    reducer = Reducer(hist_samples=512)
    total = np.zeros(NUM_BINS)
    for _ in range(40):
        reducer.add(1, x, histogram=True)
        total += reducer.take()[0].resolve()[2][0]
    assert np.abs(total / 200_000 / 40 - wanted).max() < 0.01


def test_histograms_of_repeated_calls_add_up(ways):
    reducer = Reducer(hist_samples=64)
    for seed in range(4):
        reducer.add(1, torch.randn(1000 * (seed + 1), generator=torch.Generator().manual_seed(seed)), histogram=True)
    found = ways.resolved(reducer)[1]
    assert found.hist.sum() == pytest.approx(10_000)
    assert found.rows[HIST_N] == 4 * 64


def test_a_sample_of_nothing_but_zeros_claims_nothing():
    rows = empty_rows(1)
    rows[0, :4] = 1000, 0, 0, 900
    assert histograms(np.zeros((1, 16)), rows).sum() == 0


def test_samples_of_several_dtypes_keep_their_values():
    table = stack_samples([torch.tensor([2**40], dtype=torch.int64), torch.tensor([0.5], dtype=torch.bfloat16)], 2)
    assert table.tolist() == [[float(2**40), 0.0], [0.5, 0.0]]
