"""Cells of heatmaps: the same whichever way they are spread, exact at the ends of what numbers can be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sonde.read.run.segments import EVERYTHING
from sonde.read.run.sharded import open_state
from sonde.read.run.steps import ALL_STEPS
from sonde.read.series.heatmap import HeatQuestion, live_cells, sealed_cells, to_cells
from sonde.read.series.raw import read_raw
from sonde.schema.sketch import INF, NAN
from sonde.schema.thinning import scale_of, to_places

ODD = np.array([0.0, 1.0, -10.0, 5e-324, 1e-40, 1e308, np.inf, -np.inf, np.nan, 1e-30, -0.0])


def test_places_are_exact_also_where_float32_ends() -> None:
    places = to_places(ODD, "log10")
    assert places[0] == places[10] == -400.0
    assert np.isposinf(places[6:9]).all()
    finite = [1, 2, 3, 4, 5, 9]
    with np.errstate(divide="ignore"):
        assert np.allclose(places[finite], np.log10(np.abs(ODD[finite])), rtol=1e-6)


def test_shares_are_shown_as_they_are() -> None:
    assert scale_of("zero_fraction") == scale_of("grad_cosine") == "linear"
    assert scale_of("rms") == scale_of("ratio") == "log10"
    assert to_places(np.array([-0.5, np.nan]), "linear").tolist() == [-0.5, np.inf]


@pytest.mark.parametrize("stat", ["rms", "norm", "abs_q50", "zero_fraction"])
@pytest.mark.parametrize("drop", [0, 1, 7])
def test_cells_hold_what_was_recorded(finished: object, stat: str, drop: int) -> None:
    """Whole tables are turned around in one go; tables with holes are not. Both give the same cells."""
    path: Path = finished.path  # type: ignore[attr-defined]
    state = open_state(path)
    rows = [number for number, site in state.catalog.sites.items() if site.kind == "grad"][::-1]
    asked = HeatQuestion.of(state, stat, rows)
    question = asked.question
    raw = read_raw(state, question.ids, ALL_STEPS, question.fields | {NAN, INF}, with_hist=question.needs_hist)
    keep = np.ones(len(raw), bool)
    keep[3 : 3 + drop] = False
    part = type(raw)(raw.site[keep], raw.step[keep], raw.rows[keep], None if raw.hist is None else raw.hist[keep])
    cells = to_cells(asked, part)
    from sonde.read.series.stats import stat_column

    column = stat_column(question, part, stat)
    for site, step, value, row in zip(
        part.site[column.index], part.step[column.index], column.value, part.rows[column.index], strict=True
    ):
        place = cells.places[np.searchsorted(cells.steps, step), rows.index(int(site))]
        if row[NAN] + row[INF] or not np.isfinite(value):
            assert np.isposinf(place)
        else:
            expected = to_places(np.array([value]), scale_of(stat))[0]
            assert place == pytest.approx(expected)
    assert np.isneginf(cells.places).sum() == cells.places.size - len(column.index)


def test_sealed_and_live_together_are_all(record: object) -> None:
    recording = record("live").steps(21).flush()  # type: ignore[operator]
    state = open_state(recording.path)
    rows = [number for number, site in state.catalog.sites.items() if site.kind == "param"]
    asked = HeatQuestion.of(state, "rms", rows)
    sealed = [sealed_cells(state, asked, segment) for segment in state.segments_of("stats")]
    live = live_cells(state, asked, EVERYTHING)
    steps = np.concatenate([*(cells.steps for cells in sealed), live.steps])
    assert sorted(steps.tolist()) == list(range(21))


@pytest.mark.parametrize("stat", ["rms", "norm", "max_abs"])
def test_cells_of_merged_steps_are_of_one_step(record: object, stat: str) -> None:
    """A mean is that of the merged steps; a norm is not four times as much because it covers four steps."""
    recording = record("merged").steps(64).finish()  # type: ignore[operator]
    state = open_state(recording.path)
    number = next(n for n, s in state.catalog.sites.items() if (s.kind, s.name) == ("grad", "0.weight"))
    merged = state.segments_of("stats", 1)[0]
    cells = sealed_cells(state, HeatQuestion.of(state, stat, [number]), merged)
    tensors = np.array([recording.tensors["grad", "0.weight", step] for step in range(4)])
    wanted = {
        "rms": np.sqrt((tensors**2).mean()),
        "norm": np.sqrt((tensors**2).sum() / 4),
        "max_abs": abs(tensors).max(),
    }
    assert 10.0 ** cells.places[0, 0] == pytest.approx(wanted[stat], rel=1e-5)
