"""Heatmaps: one NaN and one spike are seen at every zoom, and every cell is the highest of what it covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from big_run import Plan, Planted, big_run
from sonde.run import Run
from sonde.schema.thinning import Cells, pool, pool_into
from sonde.show.web.caches import heat_index
from sonde.show.web.caches.heat_index import COARSE_STEPS, colour_range, encode

NAN_ROW, NAN_STEP = 5, 1777
SPIKE_ROW, SPIKE_STEP = 9, 2345
WIDTHS = (1, 2, 7, 50, 100, 377, 1000, 2999, 4096)


def _codes(answer: tuple[dict[str, Any], dict[str, Any]]) -> tuple[dict[str, Any], np.ndarray]:
    header, buffers = answer
    return header, buffers["codes"].reshape(header["num_rows"], header["num_columns"])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stat", ["rms", "norm", "max_abs", "abs_mean"])
def test_one_nan_is_seen_at_every_zoom(page: Any, api: str, width: int, stat: str) -> None:
    header, codes = _codes(page.get(f"{api}/heat?kind=grad&stat={stat}&w={width}"))
    column = (NAN_STEP - header["first"]) // header["steps_per_column"]
    assert np.argwhere(codes == 255).tolist() == [[NAN_ROW, column]]


@pytest.mark.parametrize("width", WIDTHS)
def test_one_spike_is_the_highest_cell_at_every_zoom(page: Any, api: str, width: int) -> None:
    header, codes = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w={width}"))
    assert header["is_exact"]
    column = (SPIKE_STEP - header["first"]) // header["steps_per_column"]
    assert np.argwhere(codes == 254).tolist() == [[SPIKE_ROW, column]]


@pytest.mark.parametrize(("first", "last"), [(0, 2999), (1700, 1900), (1777, 1777), (2000, 2999), (5, 8)])
@pytest.mark.parametrize("width", [1, 30, 500])
def test_cells_are_the_highest_recorded_value(
    page: Any, api: str, known_run: Path, first: int, last: int, width: int
) -> None:
    header, codes = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&from={first}&to={last}&w={width}"))
    begin, size = header["first"], header["steps_per_column"]
    assert begin <= first
    assert begin + size * header["num_columns"] > last
    values = _grid(Run(known_run), "rms", 3000)
    values[NAN_ROW, NAN_STEP] = np.nan
    for column in range(0, header["num_columns"], max(1, header["num_columns"] // 7)):
        cell = values[:, begin + column * size : min(begin + (column + 1) * size, last + 1 if size == 1 else 3000)]
        finite = np.isfinite(cell).all(axis=1)
        expected = np.clip(
            (np.log10(cell.max(axis=1)) - header["lo"]) * 253 / (header["hi"] - header["lo"]) + 1, 1, 254
        )
        # One code is what rounding to float32 may move.
        assert np.abs(codes[finite, column] - expected[finite]).max(initial=0) <= 1
        assert (codes[~finite, column] == 255).all()


def _grid(run: Run, stat: str, num_steps: int) -> np.ndarray:
    table = run.stats(f"grad/*/{stat}")
    names = table["site"].combine_chunks().dictionary_decode().to_pylist()
    order = {name: row for row, name in enumerate(dict.fromkeys(names))}
    grid = np.full((len(order), num_steps), np.nan)
    grid[[order[name] for name in names], table["step"].to_numpy()] = table["value"].to_numpy()
    return grid


def test_colours_do_not_change_while_zooming(page: Any, api: str) -> None:
    whole, _ = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w=100"))
    part, _ = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&from=100&to=160&w=50"))
    assert (whole["lo"], whole["hi"]) == (part["lo"], part["hi"])


def test_rows_can_be_cut(page: Any, api: str) -> None:
    _, codes = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w=50"))
    _, some = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w=50&rows=4-9"))
    assert (some == codes[4:10]).all()
    header, none = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w=50&rows=90-99"))
    assert (header["num_rows"], none.size) == (0, 0)


def test_a_long_run_is_first_estimated_and_then_exact(page: Any, api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heat_index, "MAX_ROWS_AT_ONCE", 0)
    first, codes = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w=100"))
    assert not first["is_exact"]
    assert first["retry_ms"] > 0
    assert (codes == 255).sum() == 1  # a NaN survives merging
    page.answers.heats.loader.wait(20.0)
    then, codes = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w=100"))
    assert then["is_exact"]
    assert np.argwhere(codes == 254)[:, 0].tolist() == [SPIKE_ROW]


def test_what_does_not_fit_in_memory_is_not_read_again_and_again(
    page: Any, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat_index, "MAX_ROWS_AT_ONCE", 0)
    page.answers.heats.cache.max_bytes = 1000
    header, codes = _codes(page.get(f"{api}/heat?kind=grad&stat=rms&w=100"))
    assert not header["is_exact"]
    assert header["retry_ms"] >= 60_000
    assert page.answers.heats.loader.num_pending == 0
    assert codes.any()


def test_sites_recorded_now_and_then_leave_gaps_that_say_so(tmp_path: Path, open_page: Any) -> None:
    run = big_run(tmp_path / "runs", Plan(num_tensors=2, num_steps=50, kinds=("grad",)))
    page = open_page(tmp_path / "runs")
    id = page.get("/api/runs")["runs"][0]["id"]
    header, codes = _codes(page.get(f"/api/runs/{id}/heat?kind=grad&stat=abs_q50&w=50"))
    assert run.exists()
    assert header["num_columns"] == 50
    assert (codes > 0).sum(axis=1).tolist() == [1, 1]  # histograms are taken at every 256th step


def test_health_is_a_heat_map_whose_high_codes_are_bad(page: Any, api: str) -> None:
    header, codes = _codes(page.get(f"{api}/heat?kind=health&stat=score&w=100"))
    assert (header["lo"], header["hi"]) == (100.0, 0.0)
    assert header["labels"][0] == ""
    sick = np.unravel_index(codes.argmax(), codes.shape)
    assert header["labels"][sick[0]] == "layers.0.ln_2"  # tensor 5, in which the NaN is
    assert abs(header["first"] + sick[1] * header["steps_per_column"] - NAN_STEP) <= header["steps_per_column"]
    assert codes.shape == (len(header["labels"]), header["num_columns"])


def test_ratio_of_a_run_with_itself_is_one(page: Any, api: str) -> None:
    id = api.rpartition("/")[2]
    header, codes = _codes(page.get(f"/api/compare/heat?a={id}&b={id}&kind=grad&stat=rms&w=60"))
    assert header["lo"] == -header["hi"]
    assert header["labels"][0] == "layers.0.ln_1.weight"
    measured = codes[(codes > 0) & (codes < 255)]
    assert set(measured.tolist()) <= {127, 128}


def test_pooling_twice_is_pooling_once() -> None:
    rng = np.random.default_rng(0)
    steps = np.sort(rng.choice(5000, 700, replace=False))
    cells = Cells(steps, rng.normal(size=(700, 3)).astype(np.float32))
    once, twice = (np.full((40, 3), -np.inf, np.float32) for _ in range(2))
    pool_into(once, cells, 0, 16 * COARSE_STEPS)
    pool_into(twice, pool(cells, COARSE_STEPS), 0, 16 * COARSE_STEPS)
    assert np.array_equal(once, twice)


def test_zero_is_a_value_and_missing_is_not() -> None:
    places = np.array([[-400.0, -np.inf, np.inf, -2.0]], np.float32)
    low, high = colour_range(places, "rms")
    assert encode(places, low, high).ravel()[:3].tolist() == [1, 0, 255]


def test_the_planted_spike_would_be_missed_by_averaging(tmp_path: Path) -> None:
    """The test can fail: merged steps alone do hide it."""
    run = big_run(
        tmp_path / "runs", Plan(num_tensors=1, num_steps=2048, planted=(Planted(tensor=0, step=999, factor=30),))
    )
    values = _grid(Run(run), "rms", 2048)[0]
    averaged = np.sqrt(np.square(values).reshape(-1, 256).mean(axis=1))
    assert averaged.max() < 0.2 * values.max()
