"""Singular values against numpy's, ranks and exponents against matrices made to have them."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.read.tensors.analysis.spectra import (
    Spectrum,
    as_matrix,
    effective_rank,
    power_law,
    spectrum,
    spectrum_row,
    stable_rank,
)


def with_values(values: np.ndarray, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """A matrix with these singular values and random directions."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(shape[0], len(values))))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], len(values))))[0]
    return (left * values) @ right.T


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (1, 4)])
def test_exact_values_are_numpys(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).normal(size=shape)
    found = spectrum(matrix)
    np.testing.assert_allclose(found.values, np.linalg.svd(matrix, compute_uv=False))
    assert found.is_complete


@pytest.mark.parametrize("shape", [(300, 200), (200, 300)])
def test_randomised_values_are_close_and_never_above(shape: tuple[int, int]) -> None:
    values = 0.8 ** np.arange(200)
    found = spectrum(with_values(values, shape), k=8, exact=False)
    np.testing.assert_allclose(found.values, values[:8], rtol=1e-6)
    assert (found.values <= values[:8] * (1 + 1e-12)).all()
    assert not found.is_complete


def test_randomised_is_within_a_percent_on_noise_the_hardest_case() -> None:
    matrix = np.random.default_rng(0).normal(size=(400, 300))
    exact = np.linalg.svd(matrix, compute_uv=False)[:4]
    found = spectrum(matrix, k=4, exact=False)
    assert (found.values <= exact).all()
    np.testing.assert_allclose(found.values[0], exact[0], rtol=0.03)


def test_same_seed_same_numbers_and_the_global_generator_is_left_alone() -> None:
    matrix = np.random.default_rng(0).normal(size=(80, 60))
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    one, two = (spectrum(matrix, exact=False, seed=3).values for _ in range(2))
    assert (one == two).all()
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_ranks_of_a_matrix_made_to_have_them() -> None:
    found = spectrum(with_values(np.ones(5), (40, 30)))
    assert stable_rank(found) == pytest.approx(5.0)
    assert effective_rank(found) == pytest.approx(5.0, rel=1e-6)
    uneven = np.array([2.0, 1.0, 1.0])
    p = uneven / 4
    assert effective_rank(spectrum(with_values(uneven, (10, 10)))) == pytest.approx(np.exp(-(p * np.log(p)).sum()))


def test_stable_rank_of_a_large_matrix_uses_the_whole_norm() -> None:
    matrix = with_values(np.ones(50), (200, 150))
    row = spectrum_row(matrix, 4, exact=False)
    assert row["stable_rank"] == pytest.approx(50.0, rel=1e-6)
    assert row["method"] == "randomized"
    assert np.isnan(row["effective_rank"])
    assert row["alpha"] is None


@pytest.mark.parametrize("alpha", [2.0, 3.0, 4.5])
def test_exponent_of_a_pareto_tail_is_found(alpha: float) -> None:
    uniform = np.random.default_rng(int(alpha * 10)).uniform(size=900)
    eigenvalues = np.sort((1 - uniform) ** (-1 / (alpha - 1)))[::-1]
    found = power_law(Spectrum(np.sqrt(eigenvalues), 1.0, is_complete=True))
    assert found is not None
    assert found.alpha == pytest.approx(alpha, rel=0.15)
    assert found.ks < 0.06


def test_exponent_is_the_slow_reference() -> None:
    matrix = np.random.default_rng(0).normal(size=(40, 60))
    eigenvalues = np.sort(np.linalg.eigvalsh(matrix @ matrix.T))
    best = (np.inf, 0.0)
    for x_min in eigenvalues[: len(eigenvalues) - 9]:
        tail = eigenvalues[eigenvalues >= x_min]
        alpha = 1 + len(tail) / np.log(tail / x_min).sum()
        distance = 0.0
        for value in tail:
            fitted = 1 - (value / x_min) ** (1 - alpha)
            for measured in ((tail < value).mean(), (tail <= value).mean()):
                distance = max(distance, abs(fitted - measured))
        best = min(best, (distance, alpha))
    found = power_law(spectrum(matrix))
    assert found is not None
    assert (found.ks, found.alpha) == pytest.approx(best)


@pytest.mark.parametrize(
    "tensor", [np.ones(3), np.float64(1.0), np.ones((0, 3)), np.array([[1.0, np.nan]]), np.ones((2, 2), complex)]
)
def test_only_a_matrix_has_a_spectrum(tensor: np.ndarray) -> None:
    assert spectrum_row(np.asarray(tensor)) == {}


def test_convolution_is_a_matrix_by_output_channel() -> None:
    kernel = np.random.default_rng(0).normal(size=(4, 3, 2, 2))
    matrix = as_matrix(kernel)
    assert matrix is not None
    assert matrix.shape == (4, 12)


def test_zero_matrix_has_values_and_no_rank() -> None:
    row = spectrum_row(np.zeros((12, 12)))
    assert row["spectral_norm"] == 0.0
    assert np.isnan(row["stable_rank"])
    assert row["alpha"] is None
