"""The level of a very long loss."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.measures import curves


def test_of_a_long_run_the_level_is_nearly_that_of_every_window(monkeypatch):
    draw = np.random.default_rng(0)
    values = 5 / np.sqrt(1 + np.arange(20_000) / 50) + 0.05 * draw.standard_normal(20_000)
    values[::997] = 40.0
    monkeypatch.setattr(curves, "_MAX_SORTED", 10**9)
    exact = curves.smoothed(values, 1000)
    monkeypatch.setattr(curves, "_MAX_SORTED", 0)
    quick = curves.smoothed(values, 1000)
    assert quick.shape == exact.shape
    np.testing.assert_allclose(quick, exact, rtol=0.02)
