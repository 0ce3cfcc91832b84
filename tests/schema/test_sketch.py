"""The sketch is a commutative monoid, and merging the sketches of parts is sketching the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sonde.reduce.numpy import sketch
from sonde.schema.sketch import (
    COUNTS,
    FIELDS,
    GRAD_MOMENT,
    GRAD_SQ_OVER_V,
    GRAD_UPDATE,
    INDEX,
    MAX,
    MIN,
    MIN_EXPONENT,
    NUM_BINS,
    NUM_FIELDS,
    PAIRED,
    SUM,
    SUMABS,
    SUMSQ,
    SUMSQ_RAW,
    Array,
    N,
    empty_hist,
    empty_rows,
    merge_groups,
    merge_rows,
)
from sonde.schema.stats import Sketch

EXACT = [INDEX[name] for name in (*COUNTS, "min", "max")]
SUMS = [SUM, SUMSQ, SUMABS]

# What real tensors hold on their bad days.
HARD = [
    0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 5e-324, -5e-324, 2.2e-308, 1e-45, 1e-38, 1e-30, 6e-8,
    1e30, 3.4e38, -3.4e38, 1e153, 1e154, 1e155, 1e300, -1e300, 1.7e308, -1.7e308,
]  # fmt: skip
ELEMENTS = st.one_of(
    st.sampled_from(HARD), st.floats(-1e3, 1e3), st.floats(allow_nan=True, allow_infinity=True, width=32)
)
ARRAYS = hnp.arrays(np.float64, st.integers(0, 24), elements=ELEMENTS)
WHOLE_NUMBERS = st.integers(-1000, 1000).map(float)


@st.composite
def any_sketch(draw: st.DrawFn) -> Sketch:
    """A sketch of an array, with clipping and paired sums present or absent."""
    x = draw(ARRAYS)
    result = sketch(x, histogram=draw(st.booleans()))
    if draw(st.booleans()):
        result.rows[SUMSQ_RAW] = result.rows[SUMSQ] if draw(st.booleans()) else 7.0
    if draw(st.booleans()):
        paired = draw(st.tuples(*[WHOLE_NUMBERS] * 3))
        result.rows[[GRAD_UPDATE, GRAD_MOMENT, GRAD_SQ_OVER_V]] = paired if x.size else 0.0
    return result


def assert_same(a: Sketch, b: Sketch) -> None:
    """Counts, extremes and absences exactly; sums to rounding of their magnitude."""
    np.testing.assert_array_equal(a.hist, b.hist)
    np.testing.assert_array_equal(a.rows[EXACT], b.rows[EXACT])
    np.testing.assert_array_equal(np.isnan(a.rows[-4:]), np.isnan(b.rows[-4:]))
    scale = max(a.rows[SUMABS], 1e-300) if np.isfinite(a.rows[SUMABS]) else np.inf
    if np.isfinite(scale):
        np.testing.assert_allclose(a.rows[SUM], b.rows[SUM], rtol=1e-13, atol=1e-13 * scale)
    np.testing.assert_allclose(a.rows[[SUMSQ, SUMABS]], b.rows[[SUMSQ, SUMABS]], rtol=1e-13)
    np.testing.assert_allclose(a.rows[SUMSQ_RAW:], b.rows[SUMSQ_RAW:], rtol=1e-13)


def identical(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a, b, equal_nan=True))


@given(any_sketch())
def test_merging_the_empty_sketch_changes_nothing(a: Sketch) -> None:
    for merged in (a | Sketch(), Sketch() | a):
        assert identical(merged.rows, a.rows)
        assert identical(merged.hist, a.hist)


@given(any_sketch(), any_sketch())
def test_merge_commutes_exactly(a: Sketch, b: Sketch) -> None:
    assert identical((a | b).rows, (b | a).rows)
    assert identical((a | b).hist, (b | a).hist)


@given(any_sketch(), any_sketch(), any_sketch())
def test_merge_is_associative(a: Sketch, b: Sketch, c: Sketch) -> None:
    assert_same((a | b) | c, a | (b | c))


@given(ARRAYS, st.integers(1, 5))
@example(np.array([]), 3)
@example(np.full(4, np.nan), 2)
@example(np.array([1e300, -1e300, np.inf]), 3)
@example(np.array([1.7e308, 1.7e308, -1.7e308, -1.7e308]), 2)
def test_merging_the_parts_is_sketching_the_whole(x: Array, num_parts: int) -> None:
    merged = Sketch()
    for part in np.array_split(x, num_parts):
        merged |= sketch(part)
    assert_same(merged, sketch(x))


@given(ARRAYS)
def test_a_sketch_says_what_the_array_holds(x: Array) -> None:
    s, finite = sketch(x), x[np.isfinite(x)]
    assert (s.n, s.nan, s.inf) == (x.size, np.isnan(x).sum(), np.isinf(x).sum())
    assert s.zero == (x == 0).sum()
    assert s.hist.sum() == np.count_nonzero(finite)
    assert s.hist_n == x.size
    assert s.rows[MIN] == min(finite, default=np.inf)
    assert s.rows[MAX] == max(finite, default=-np.inf)


@pytest.mark.parametrize("exponent", [-60, -49, -48, -47, -1, 0, 1, 14, 15, 16, 40])
def test_a_power_of_two_begins_its_bin_and_the_ends_are_clamped(exponent: int) -> None:
    value = 2.0**exponent
    for x, expected in ((value, exponent), (np.nextafter(value, 0), exponent - 1), (-value, exponent)):
        index = int(np.clip(expected - MIN_EXPONENT, 0, NUM_BINS - 1))
        assert sketch(np.array([x])).hist.nonzero()[0].tolist() == [index]


def test_squares_too_large_for_float64_are_infinite_and_the_extremes_stay_exact() -> None:
    s = sketch(np.array([1e300, -2e300]))
    assert s.sumsq == np.inf
    assert (s.min, s.max, s.sum, s.inf) == (-2e300, 1e300, -1e300, 0)


def test_squares_of_the_largest_float32_fit() -> None:
    s = sketch(np.full(1000, np.finfo(np.float32).max))
    assert s.rms == pytest.approx(float(np.finfo(np.float32).max))


def test_a_tensor_of_nothing_but_nan_has_no_norm() -> None:
    s = sketch(np.full(3, np.nan))
    assert np.isnan([s.norm, s.rms, s.mean, s.min, s.max, s.norm_preclip, s.clip_factor]).all()
    assert (s.nan_fraction, s.n) == (1.0, 3)


@given(st.lists(st.lists(any_sketch(), min_size=1, max_size=5), max_size=4))
def test_merging_groups_is_folding_rows(groups: list[list[Sketch]]) -> None:
    flat = [s for group in groups for s in group]
    rows = np.stack([s.rows for s in flat]) if flat else empty_rows(0)
    starts = np.cumsum([0, *(len(group) for group in groups)])[:-1].astype(np.intp)
    merged = merge_groups(rows, starts)
    assert merged.shape == (len(groups), NUM_FIELDS)
    for row, group in zip(merged, groups, strict=True):
        folded = Sketch()
        for s in group:
            folded |= s
        assert_same(Sketch(row, folded.hist), folded)


@given(st.lists(any_sketch(), min_size=1, max_size=5), st.lists(any_sketch(), min_size=1, max_size=5))
def test_merging_tables_is_merging_their_rows(left: list[Sketch], right: list[Sketch]) -> None:
    num = min(len(left), len(right))
    a, b = (np.stack([s.rows for s in table[:num]]) for table in (left, right))
    merged = merge_rows(a, b)
    for i in range(num):
        assert identical(merged[i], merge_rows(a[i], b[i]))


def with_fields(x: Array, **fields: float) -> Sketch:
    s = sketch(x)
    for name, value in fields.items():
        s.rows[INDEX[name]] = value
    return s


def test_a_part_that_was_not_clipped_adds_its_own_squares_to_the_raw_sum() -> None:
    clipped, plain = with_fields(np.array([3.0]), sumsq_raw=36.0), sketch(np.array([4.0]))
    assert (clipped | plain).sumsq_raw == 36.0 + 16.0
    assert (clipped | plain).norm_preclip == np.sqrt(52.0)
    assert np.isnan((plain | plain).sumsq_raw)
    assert (plain | plain).norm_preclip == (plain | plain).norm


@pytest.mark.parametrize("name", PAIRED)
def test_a_paired_sum_over_a_part_is_not_one_over_the_whole(name: str) -> None:
    has, lacks, nothing = with_fields(np.ones(2), **{name: 5.0}), sketch(np.ones(2)), sketch(np.empty(0))
    assert getattr(has | has, name) == 10.0
    assert np.isnan(getattr(has | lacks, name))
    assert np.isnan(getattr(lacks | has, name))
    assert getattr(has | nothing, name) == 5.0
    taken_over_nothing = with_fields(np.empty(0), **{name: 0.0})
    assert getattr(nothing | taken_over_nothing, name) == getattr(taken_over_nothing | nothing, name) == 0.0


def test_the_empty_sketch_has_every_field_and_merges_nothing_into_tables() -> None:
    rows = empty_rows(2, 3)
    assert rows.shape == (2, 3, len(FIELDS))
    assert (rows[..., N] == 0).all()
    assert empty_hist(2).shape == (2, NUM_BINS)
    assert merge_groups(empty_rows(0), np.empty(0, np.intp)).shape == (0, NUM_FIELDS)


def test_a_sketch_answers_by_name_and_refuses_what_it_does_not_know() -> None:
    s = sketch(np.array([3.0, 4.0]))
    assert (s.n, s.norm, s.max) == (2, 5.0, 4.0)
    assert isinstance(s.n, int)
    with pytest.raises(AttributeError, match="rsm"):
        _ = s.rsm
