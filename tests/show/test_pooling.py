"""One pooling and one thinning: the dashboard, the terminal and figures keep the same extremes of the same run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from big_run import Plan, Planted, big_run
from sonde.run import Run
from sonde.schema.thinning import MISSING, extremes, min_max, pool_into
from sonde.show.pooled import pool

COLUMNS, STEPS = 32, 512


def test_dashboard_and_terminal_pool_alike(tmp_path: Path) -> None:
    planted = (Planted(tensor=1, step=300, factor=1e4), Planted(tensor=2, step=77, num_nan=3))
    run = Run(big_run(tmp_path / "runs", Plan(num_tensors=4, num_steps=STEPS, kinds=("grad",), planted=planted)))
    terminal = pool(run, "grad/*/rms", width=COLUMNS)
    sites = run.catalog.sites
    heat = run.heat(
        "rms", [number for name in terminal.sites for number, s in sites.items() if f"grad/{s.name}" == name]
    )
    dashboard = np.full((COLUMNS, len(terminal.sites)), MISSING)
    for file in heat.files(0, STEPS - 1):
        pool_into(dashboard, heat.cells(file), 0, STEPS // COLUMNS)
    np.testing.assert_array_equal(np.isposinf(dashboard.T), terminal.is_odd)
    assert terminal.is_odd.sum() == 1
    finite = np.isfinite(terminal.cells)
    np.testing.assert_allclose(dashboard.T[finite], np.log10(terminal.cells[finite]), rtol=1e-5)


def test_extremes_are_those_of_each_bucket() -> None:
    rng = np.random.default_rng(0)
    bucket = np.sort(rng.integers(0, 40, 500))
    values = rng.integers(0, 9, 500).astype(float)  # with many ties
    lowest, highest = extremes(bucket, values)
    for number, low, high in zip(np.unique(bucket), lowest, highest, strict=True):
        own = np.flatnonzero(bucket == number)
        assert low == own[values[own] == values[own].min()][0]
        assert high == own[values[own] == values[own].max()][-1]


def test_thinning_keeps_spikes_the_ends_and_nonfinite_values() -> None:
    values = np.ones(10_000)
    values[[1234, 5678]], values[4321] = [9.0, -9.0], np.nan
    kept = min_max(np.arange(10_000), values, 50)
    assert {0, 1234, 4321, 5678, 9999} <= set(kept.tolist())
    assert len(kept) <= 2 * 50 + 3
