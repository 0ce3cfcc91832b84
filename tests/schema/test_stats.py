"""Every stat against plain numpy on the array itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sonde.reduce.numpy import sketch
from sonde.schema.joined import JOINED
from sonde.schema.sketch import INDEX, Array, empty_hist, empty_rows
from sonde.schema.stats import STATS, Sketch, quantile

# Magnitudes inside the histogram, where every stat has its full meaning; the ends have separate tests.
INSIDE = st.one_of(st.sampled_from([0.0, np.nan, np.inf]), st.floats(2**-40, 2**14), st.floats(-(2**14), -(2**-40)))
ARRAYS = hnp.arrays(np.float64, st.integers(1, 60), elements=INSIDE)

NAN = float("nan")


def finite(x: Array) -> Array:
    return x[np.isfinite(x)]


def over(function: Callable[[Array], float]) -> Callable[[Array], float]:
    """A function of the finite elements; NaN when there are none."""
    return lambda x: float(function(finite(x))) if finite(x).size else NAN


def magnitudes(x: Array) -> Array:
    return np.abs(finite(x)[finite(x) != 0])


def share_below(exponent: int) -> Callable[[Array], float]:
    return lambda x: float((magnitudes(x) < 2.0**exponent).mean()) if magnitudes(x).size else NAN


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x * x)))


EXPECTED: dict[str, Callable[[Array], float]] = {
    "n": lambda x: x.size,
    "nan": lambda x: np.isnan(x).sum(),
    "inf": lambda x: np.isinf(x).sum(),
    "zero": lambda x: (x == 0).sum(),
    "hist_n": lambda x: x.size,
    "sum": lambda x: finite(x).sum(),
    "sumsq": lambda x: (finite(x) ** 2).sum(),
    "sumabs": lambda x: np.abs(finite(x)).sum(),
    "mean": over(np.mean),
    "var": over(np.var),
    "std": over(np.std),
    "rms": over(rms),
    "norm": over(np.linalg.norm),
    "norm_preclip": over(np.linalg.norm),
    "clip_factor": over(lambda _: 1.0),
    "abs_mean": over(lambda x: np.abs(x).mean()),
    "min": over(np.min),
    "max": over(np.max),
    "max_abs": over(lambda x: np.abs(x).max()),
    "zero_fraction": lambda x: (x == 0).mean(),
    "nan_fraction": lambda x: np.isnan(x).mean(),
    "inf_fraction": lambda x: np.isinf(x).mean(),
    "nonfinite_fraction": lambda x: (~np.isfinite(x)).mean(),
    "rms_over_abs_mean": over(lambda x: rms(x) / np.abs(x).mean() if np.abs(x).any() else NAN),
    "fp16_underflow_fraction": share_below(-24),
    "below_fp16_normal": share_below(-14),
}
QUANTILES = {f"abs_q{percent:02d}": percent / 100 for percent in (1, 5, 25, 50, 75, 95, 99)}
PAIRED = {"grad_update_dot", "grad_moment_dot", "second_moment_lag"}


def test_every_stat_is_checked_here() -> None:
    assert set(STATS) == set(EXPECTED) | set(QUANTILES) | PAIRED | {"dynamic_range"}


@given(ARRAYS)
def test_stats_are_what_numpy_says_of_the_array(x: Array) -> None:
    s = sketch(x)
    # The sums give var to rounding of the mean square, not of the variance itself.
    slack = {"var": 1e-12 * float(s.rms) ** 2, "std": 1e-6 * float(s.rms)}
    for name, expected in EXPECTED.items():
        atol = np.nan_to_num(slack.get(name, 1e-12 * s.sumabs))
        np.testing.assert_allclose(getattr(s, name), expected(x), rtol=1e-10, atol=atol, err_msg=name)


@given(ARRAYS, st.sampled_from(sorted(QUANTILES)))
def test_quantiles_are_right_to_the_width_of_a_bin(x: Array, name: str) -> None:
    value, q, size = getattr(sketch(x), name), QUANTILES[name], finite(x).size
    if not size:
        assert np.isnan(value)
        return
    # Rounding of q * n may move the answer to the neighbouring element; the bin then doubles or halves it at most.
    low, high = (np.quantile(np.abs(finite(x)), np.clip(q + d, 0, 1), method="inverted_cdf") for d in (-1e-9, 1e-9))
    assert low / 2 <= value <= high * 2


@given(ARRAYS)
def test_quantiles_never_fall_as_they_rise(x: Array) -> None:
    s = sketch(x)
    values = [getattr(s, name) for name in QUANTILES]
    if finite(x).size:
        assert values == sorted(values)
        assert values[-1] <= s.max_abs


@given(ARRAYS)
def test_dynamic_range_counts_the_powers_of_two_between_the_ends(x: Array) -> None:
    value = sketch(x).dynamic_range
    if not magnitudes(x).size:
        assert np.isnan(value)
        return
    low, high = (np.quantile(magnitudes(x), q, method="inverted_cdf") for q in (0.01, 0.99))
    assert value == np.frexp(high)[1] - np.frexp(low)[1]  # exact, where log2 of 4095.999… is 12


def test_quantiles_above_the_histogram_reach_to_the_largest_magnitude() -> None:
    s = sketch(np.array([1e30] * 99 + [1e38]))
    assert s.abs_q99 == pytest.approx(1e38, rel=0.9)
    assert s.abs_q99 <= 1e38


def test_quantiles_below_the_histogram_say_at_most() -> None:
    assert sketch(np.full(10, 1e-30)).abs_q50 == 1e-30  # all are below the first bin; the largest magnitude is known
    assert sketch(np.array([1e-30] * 9 + [1.0])).abs_q50 <= 2.0**-47


@pytest.mark.parametrize("name", sorted(STATS))
def test_the_empty_sketch_has_no_value_but_its_sums_and_counts(name: str) -> None:
    value = getattr(Sketch(), name)
    if name in {"n", "nan", "inf", "zero", "hist_n", "sum", "sumsq", "sumabs"}:
        assert value == 0
    else:
        assert np.isnan(value)


def test_without_a_histogram_what_needs_it_is_nan() -> None:
    s = sketch(np.arange(5.0), histogram=False)
    for stat in STATS.values():
        if stat.needs_hist:
            assert np.isnan(getattr(s, stat.name))


@pytest.mark.parametrize("name", sorted(STATS))
def test_a_stat_of_a_table_is_the_stat_of_each_row(name: str) -> None:
    parts = [sketch(x) for x in (np.arange(4.0), np.zeros(3), np.array([np.nan]), np.array([]), np.full(2, 1e300))]
    rows, hist = np.stack([s.rows for s in parts]), np.stack([s.hist for s in parts])
    table = STATS[name].of(rows, hist)
    np.testing.assert_array_equal(table, [getattr(s, name) for s in parts])
    np.testing.assert_array_equal(STATS[name].of(rows[None], hist[None])[0], table)


def test_overflowed_squares_are_infinite_and_the_rest_stays_right() -> None:
    s = sketch(np.array([1e300, -1e300, 1e300]))
    assert (s.norm, s.rms) == (np.inf, np.inf)
    assert (s.abs_mean, s.max_abs) == (pytest.approx(1e300), 1e300)


def test_denormals_and_negative_zero_are_seen() -> None:
    s = sketch(np.array([5e-324, -0.0, 0.0]))
    assert (s.zero, s.max, s.zero_fraction) == (2, 5e-324, pytest.approx(2 / 3))
    assert s.fp16_underflow_fraction == 1.0


def test_clipping_shows_in_both_norms_and_their_quotient() -> None:
    s = sketch(np.array([3.0, 4.0]))
    s.rows[INDEX["sumsq_raw"]] = 100.0
    assert (s.norm, s.norm_preclip, s.clip_factor) == (5.0, 10.0, 0.5)


def test_clip_factor_of_a_zero_gradient_is_one() -> None:
    assert sketch(np.zeros(3)).clip_factor == 1.0


@given(hnp.arrays(np.float64, (4, 12), elements=st.floats(0.01, 10)))
def test_paired_and_joined_stats_are_what_numpy_says(vectors: Array) -> None:
    param, grad, update, moment = vectors * np.array([1, -1, 0.01, 0.5])[:, None]
    v = grad**2 + 0.1
    rows = sketch(update).rows
    rows[INDEX["grad_update"]] = grad @ update
    rows[INDEX["grad_moment"]] = grad @ moment
    rows[INDEX["grad_sq_over_v"]] = (grad**2 / v).sum()
    own = Sketch(rows, empty_hist())
    assert own.grad_update_dot == grad @ update
    assert own.grad_moment_dot == grad @ moment
    assert own.second_moment_lag == pytest.approx((grad**2 / v).mean())

    norm = np.linalg.norm
    expected = {
        "ratio": norm(update) / norm(param),
        "grad_cosine": grad @ update / norm(grad) / norm(update),
        "moment_cosine": grad @ moment / norm(grad) / norm(moment),
    }
    partners = {("param", ""): param, ("grad", ""): grad, ("optim", ".exp_avg"): moment}
    assert set(expected) == set(JOINED)
    for name, joined in JOINED.items():
        tables = [sketch(partners[partner]).rows for partner in joined.partners]
        np.testing.assert_allclose(joined.of(rows, *tables), expected[name], rtol=1e-9, err_msg=name)


def test_joined_stats_of_zero_or_missing_partners_are_not_made_up() -> None:
    update, zero = sketch(np.ones(2)).rows, sketch(np.zeros(2)).rows
    assert JOINED["ratio"].of(update, zero) == np.inf
    assert np.isnan(JOINED["ratio"].of(zero, zero))
    assert np.isnan(JOINED["grad_cosine"].of(update, update))  # its paired sum was never taken
    assert np.isnan(JOINED["ratio"].of(empty_rows(), empty_rows()))


def test_cosine_survives_sums_of_squares_whose_product_underflows() -> None:
    grad = np.full(4, 1e-100)
    rows = sketch(grad).rows
    rows[INDEX["grad_update"]] = grad @ grad
    assert JOINED["grad_cosine"].of(rows, rows) == pytest.approx(1.0)


def test_every_stat_and_joined_stat_says_what_it_means() -> None:
    for stat in [*STATS.values(), *JOINED.values()]:
        assert stat.meaning.endswith(".")
    assert not set(STATS) & set(JOINED)


def test_a_quantile_of_ones_own_is_one_call() -> None:
    s = sketch(np.repeat([1.0, 100.0], [90, 10]))
    assert 1.0 <= float(quantile(0.5)(s.rows, s.hist)) < 2.0
