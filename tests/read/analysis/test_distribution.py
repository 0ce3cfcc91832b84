"""Distances between distributions against scipy and against cases with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from sonde.read.tensors.analysis.distribution import (
    QUANTILES,
    common_edges,
    distribution,
    histogram,
    kl_divergence,
    sample,
    wasserstein,
)


@pytest.mark.parametrize(("num_a", "num_b"), [(100, 100), (100, 37), (1, 5)])
def test_wasserstein_is_scipys(num_a: int, num_b: int) -> None:
    rng = np.random.default_rng(num_b)
    a, b = rng.normal(size=num_a), rng.standard_t(3, size=num_b)
    assert wasserstein(np.sort(a), np.sort(b)) == pytest.approx(scipy_stats.wasserstein_distance(a, b))


def test_a_shift_moves_wasserstein_by_itself() -> None:
    values = np.sort(np.random.default_rng(0).normal(size=1000))
    assert wasserstein(values, values + 0.25) == pytest.approx(0.25)


def test_kl_of_gaussians_is_near_the_analytic_one() -> None:
    rng = np.random.default_rng(0)
    now, then = (np.sort(rng.normal(mean, 1.0, 400_000)) for mean in (1.0, 0.0))
    edges = common_edges([now, then])
    assert kl_divergence(histogram(now, edges), histogram(then, edges)) == pytest.approx(0.5, rel=0.05)


def test_kl_is_zero_for_the_same_and_finite_for_what_does_not_meet() -> None:
    same, apart = np.array([0, 10, 5]), np.array([15, 0, 0])
    assert kl_divergence(same, same) == 0.0
    assert 0 < kl_divergence(apart, np.array([0, 0, 15])) < np.inf


def test_rows_have_quantiles_and_common_bins() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=500), rng.normal(size=500) * 3
    rows = distribution([first, second])
    np.testing.assert_allclose(rows[1]["quantiles"], np.quantile(second, QUANTILES))
    assert rows[0]["edges"] is rows[1]["edges"]
    assert rows[0]["counts"].sum() == rows[1]["counts"].sum() == 500
    assert rows[0]["kl_previous"] is None
    assert rows[1]["wasserstein_first"] == pytest.approx(scipy_stats.wasserstein_distance(second, first))
    assert rows[1]["std"] == pytest.approx(second.std())


def test_counts_are_numpys() -> None:
    values = np.sort(np.random.default_rng(0).normal(size=1000))
    edges = common_edges([values, values[:10] * 2])
    assert histogram(values, edges).tolist() == np.histogram(values, edges)[0].tolist()
    assert histogram(values, np.array([-1.0, 0.0, 1.0])).tolist() == [(values < 0).sum(), (values >= 0).sum()]


def test_not_finite_is_counted_and_left_out() -> None:
    (row,) = distribution([np.array([1.0, np.nan, np.inf, 3.0])])
    assert (row["mean"], row["nonfinite"], row["counts"].sum()) == (2.0, 2, 2)


@pytest.mark.parametrize("values", [np.array([]), np.array([np.nan]), np.array([2.0, 2.0])])
def test_degenerate_samples_are_answered(values: np.ndarray) -> None:
    row = distribution([values, values])[1]
    assert row["kl_first"] == 0.0
    assert len(row["edges"]) == 65
    assert (np.diff(row["edges"]) > 0).all()


def test_sample_is_everything_when_small_and_spread_when_large() -> None:
    matrix = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    assert sample(matrix, 5000).tolist() == matrix.reshape(-1).tolist()
    few = sample(matrix, 100)
    assert len(few) <= 100
    assert len({value % 64 for value in few}) > 32  # not always the same columns
