"""Histograms of samples, against an implementation that is slow and obvious."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sonde.reduce.exponents import histograms
from sonde.schema.sketch import INF, MIN_EXPONENT, NAN, NUM_BINS, ZERO, N, empty_rows

SPECIAL = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, -1e-310, 2.2250738585072014e-308, 1.7e308]


def obvious(samples, rows):
    found = np.zeros((len(samples), NUM_BINS))
    for row, values in zip(found, samples, strict=True):
        for value in values.tolist():
            if value != 0 and math.isfinite(value):
                exponent = math.frexp(value)[1] - 1
                row[min(max(exponent - MIN_EXPONENT, 0), NUM_BINS - 1)] += 1
    there = rows[:, N] - rows[:, NAN] - rows[:, INF] - rows[:, ZERO]
    seen = found.sum(axis=1)
    return found * np.divide(there, seen, out=np.zeros(len(found)), where=seen > 0)[:, None]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_histograms_of_anything(dtype, share):
    random = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        samples = (random.standard_normal((7, 200)) * 10.0 ** random.integers(-320, 300, (7, 200))).astype(dtype)
        special = random.choice(SPECIAL, samples.shape).astype(dtype)
    samples = np.where(random.random(samples.shape) < share, special, samples)
    rows = empty_rows(7)
    rows[:, N], rows[:, ZERO], rows[:, NAN] = 1000, np.arange(7), 3
    np.testing.assert_array_equal(histograms(samples, rows), obvious(samples, rows))


def test_histograms_of_no_rows():
    assert histograms(np.empty((0, 16)), empty_rows(0)).shape == (0, NUM_BINS)
