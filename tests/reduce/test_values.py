"""Awkward numbers at awkward places and sizes, against the specification in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonde.reduce.cpu import plan as plan_module
from sonde.reduce.cpu.plan import LARGE
from sonde.reduce.cpu.rows import CHUNK_ROWS, ROW
from sonde.schema.sketch import SUM, SUMSQ

pytestmark = pytest.mark.usefixtures("each_kernel")

SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0]
EDGES = [ROW, LARGE, ROW * CHUNK_ROWS]

magnitudes = st.sampled_from([1.0, 1e-3, 1e3, 1e-20, 1e-30, 1e-38, 1e-44, 1e18, 1e19, 1e30, 3e38])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A few rows of numbers of one magnitude, with other magnitudes and special values sprinkled in."""
    size = draw(st.integers(0, 3) | st.integers(500, 520) | st.integers(1, 3000))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(size, generator=generator, dtype=torch.float64).clamp(-1, 1) * draw(magnitudes)
    if draw(st.booleans()):
        x = x.abs()  # the reducer has a shorter way for what is never negative
    if size:
        for place, value in draw(
            st.dictionaries(st.integers(0, size - 1), st.sampled_from(SPECIAL), max_size=6)
        ).items():
            x[place] = value
        for place, value in draw(st.dictionaries(st.integers(0, size - 1), magnitudes, max_size=3)).items():
            x[place] = value
    if draw(st.integers(0, 5)) == 0:
        x[draw(st.integers(0, 600)) :] = draw(st.sampled_from(SPECIAL))
    return x.to(dtype)


@given(st.lists(tensors(), min_size=1, max_size=6))
def test_any_numbers_by_every_way(check, xs):
    check(xs)


@pytest.mark.parametrize(
    "value", [1e-44, 1e-38, 1e-23, 3e-22, 1e-21, 1e-19, 1e-16, 1.7e19, 1.9e19, 1e37, 3.4e38], ids=str
)
@pytest.mark.parametrize("size", [1, 511, 512, 1300])
def test_one_magnitude_throughout(check, value, size):
    x = torch.full((size,), value)
    check([x, -x, torch.cat([x, -x]), x.to(torch.bfloat16)])


def test_one_large_value_among_denormals(check):
    x = torch.full((2000,), 1e-42)
    x[1000] = 1.0
    check([x, -x])


@pytest.mark.parametrize("value", [1e-320, 1e-160, 1e-150, 1e150, 1e155, 1e307], ids=str)
def test_float64_extremes_that_still_have_a_sum(check, value):
    check([torch.full((10,), value, dtype=torch.float64), torch.full((700,), -value / 100, dtype=torch.float64)])


def test_sums_that_float64_cannot_hold_are_infinite_without_a_warning(ways):
    huge = torch.full((3000,), 1e308, dtype=torch.float64)
    for way in ways.names:
        found = ways.rows(way, [huge, -huge, torch.full((3000,), 1e200, dtype=torch.float64)])
        assert [found[k].rows[SUM] for k in (0, 1)] == [np.inf, -np.inf]
        assert [found[k].rows[SUMSQ] for k in (0, 1, 2)] == [np.inf] * 3


def test_long_sums_keep_their_digits(check):
    # A float32 sum over all of it would be off by percents.
    x = torch.full((3_000_000,), 0.1)
    x[::2] = 1e-4
    check([x])


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
def test_sizes_around_the_edges_of_rows_chunks_and_packing(check, edge, offset, dtype):
    size = edge + offset
    x = torch.arange(size) % 97 - 30
    x[-1] = 99  # the last element counts
    x[0] = -77
    other = torch.ones(5)
    check([other.to(dtype), x.to(dtype), (x % 5).to(dtype)])


@pytest.mark.parametrize("special", [float("nan"), float("inf"), 0.0], ids=str)
def test_special_value_in_the_first_and_last_place_of_every_block(check, special):
    size = ROW * CHUNK_ROWS + ROW + 3
    for place in (0, ROW - 1, ROW, ROW * CHUNK_ROWS - 1, ROW * CHUNK_ROWS, size - 4, size - 1):
        x = torch.full((size,), 2.0)
        x[place] = special
        check([x], way="add")
        check([x.to(torch.bfloat16)], way="add_all")


def test_packed_tails_do_not_leak_into_their_neighbours(check):
    # All positive or all negative: a zero from after a tail would show as an extreme or be counted.
    xs = [torch.full((size,), sign * (size + 1.0)) for size in (1, 3, 511, 512, 513, 1023, 1) for sign in (1, -1)]
    check(xs)
    check([x.to(torch.bfloat16) for x in xs])


def test_packed_buffer_longer_than_a_chunk(check):
    # More than CHUNK_ROWS packed rows, tails in several chunks.
    xs = [torch.full((513 + i % 300,), 1.0 + i) for i in range(1500)]
    xs[700][5] = float("nan")
    xs[1400][-1] = 0.0
    check(xs, way="add_all")


def test_tensor_across_the_edge_of_a_packed_chunk(check):
    xs = [torch.ones(LARGE - 1) * (i + 1) for i in range(10)]
    assert sum(-(-x.numel() // ROW) for x in xs) > CHUNK_ROWS
    xs[8][:] = -5.0
    check(xs, way="add_all")


def test_large_tensors_of_several_dtypes_in_one_list(check):
    # Converted blocks are repaired at once, the others later; one must not disturb the other.
    xs = [torch.randn(LARGE + 700, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    for x in xs:
        x[::1000] = 0.0
        x[7] = float("nan")
    xs[1], xs[3] = xs[1].to(torch.bfloat16), xs[3].to(torch.float16)
    check(xs)


def test_kept_lists_use_another_limit_for_large():
    assert plan_module.LARGE_KEPT > LARGE
