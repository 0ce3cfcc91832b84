"""Figures of whole tensors: the drawn numbers are those of numpy, and what cannot be drawn is explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from sonde.errors import UsageError
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write import open_store

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'sonde-ml[plot]'")

STEPS = [0, 10, 30]
SHARES = {"25-75 %": (0.25, 0.75), "5-95 %": (0.05, 0.95), "0-100 %": (0.0, 1.0)}


def values_at(step: int, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(len(shape))
    return (rng.standard_normal(shape) + step * rng.standard_normal(shape) / 20).astype(np.float32)


WEIGHTS = [values_at(step, (8, 6)) for step in STEPS]


@pytest.fixture
def run(begin: Any) -> sonde.Run:
    recording = begin()
    store = open_store("zarr", recording.path)
    for step, weight in zip(STEPS, WEIGHTS, strict=True):
        broken = np.full((3, 2), np.nan, np.float32) if step else np.ones((3, 2), np.float32)
        tensors = {"param/0.weight": weight, "param/0.bias": values_at(step, (8,)), "grad/0.weight": broken}
        store.write(Snapshot(step, 0.0, "test", {name: HostTensor.of(array) for name, array in tensors.items()}))
    store.close()
    return sonde.open(recording.steps(2, lambda step: 1.0).finish())


def test_evolution_draws_norm_distance_cosine_and_quantiles(run: sonde.Run) -> None:
    norm, distance, cosine, values = run.plot("param/0.weight", style="evolution").axes
    first, norms = WEIGHTS[0], [np.linalg.norm(weight.astype(float)) for weight in WEIGHTS]
    np.testing.assert_allclose(norm.lines[0].get_xdata(), STEPS)
    np.testing.assert_allclose(norm.lines[0].get_ydata(), norms)
    np.testing.assert_allclose(
        distance.lines[0].get_ydata(), [np.linalg.norm(weight.astype(float) - first) for weight in WEIGHTS]
    )
    dots = [float((weight.astype(float) * first).sum()) for weight in WEIGHTS]
    np.testing.assert_allclose(cosine.lines[0].get_ydata(), np.array(dots) / norms / norms[0])
    np.testing.assert_allclose(values.lines[0].get_ydata(), [np.median(weight) for weight in WEIGHTS], rtol=1e-6)
    assert [axes.get_ylabel() for axes in (norm, distance, cosine, values)] == [
        "norm", "distance from first", "cosine to first", "values",
    ]  # fmt: skip
    for band in values.collections:
        corners = band.get_paths()[0].vertices
        drawn = [[side(corners[corners[:, 0] == step, 1]) for side in (np.min, np.max)] for step in STEPS]
        expected = [np.quantile(weight.astype(float), SHARES[band.get_label()]) for weight in WEIGHTS]
        np.testing.assert_allclose(drawn, expected, err_msg=band.get_label())
    assert {band.get_label() for band in values.collections} == set(SHARES)


def test_evolution_of_several_tensors_names_each_once(run: sonde.Run) -> None:
    axes = run.plot("param/*", style="evolution", steps="10:").axes
    assert axes[0].get_legend_handles_labels()[1] == ["param/0.weight", "param/0.bias"]
    assert [one.get_legend() is None for one in axes] == [False, True, True, True]
    assert [line.get_ydata()[0] for line in axes[1].lines] == [0.0, 0.0]
    assert list(axes[0].lines[0].get_xdata()) == [10, 30]


def test_nonfinite_snapshots_are_marked(run: sonde.Run) -> None:
    figure = run.plot("grad/0.weight", style="evolution")
    marks = {line.get_label(): line for line in figure.axes[0].lines}["non-finite"]
    assert list(marks.get_xdata()) == [10, 30]
    drawn = [axes.lines[0].get_ydata() for axes in figure.axes[:2]]
    np.testing.assert_allclose(drawn, [[6**0.5, np.nan, np.nan], [0.0, np.nan, np.nan]])
    assert figure._repr_png_()


def test_spectra_draw_the_singular_values_of_each_snapshot(run: sonde.Run, tmp_path: Path) -> None:
    figure = run.plot(["param/*", "grad/*"], style="spectra", log=False)
    weights, grads = (axes.lines for axes in figure.axes[:2])
    assert [line.get_label() for line in weights] == ["step 0", "step 10", "step 30"]
    for line, weight in zip(weights, WEIGHTS, strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.linalg.svd(weight.astype(float), compute_uv=False))
        assert list(line.get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert [line.get_label() for line in grads] == ["step 0"]  # the others are NaN
    assert len({line.get_color() for line in weights}) == 3
    assert "param/0.weight" in figure.axes[0].get_title(loc="left")
    figure.savefig(tmp_path / "x.svg")


def test_large_matrix_says_that_only_the_largest_values_are_drawn(
    run: sonde.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sonde.read.tensors.analysis.spectra.EXACT_UP_TO", 4)
    monkeypatch.setattr("sonde.read.tensors.analysis.spectra.LARGEST", 2)
    axes = run.plot("param/0.weight", style="spectra", steps=30, log=False).axes[0]
    expected = np.linalg.svd(WEIGHTS[-1].astype(float), compute_uv=False)[:2]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), expected)
    assert "the largest 2 of 6" in axes.get_xlabel()


@pytest.mark.parametrize(
    ("pattern", "style", "words"),
    [
        ("param/0.wieght", "evolution", r"no tensor matches .*param/0\.weight"),
        ("param/0.weight", "auto", r"no scalar .* need the style evolution or spectra"),
        ("param/*", "auto", r"nothing in .* need the style evolution or spectra"),
        ("param/0.bias", "spectra", "no tensor with two or more axes"),
    ],
)
def test_tensors_that_cannot_be_drawn_say_why(run: sonde.Run, pattern: str, style: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run.plot(pattern, style=style)


def test_too_many_tensors_are_refused_with_their_number(run: sonde.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonde.show.plot.tensors.MAX_LINES", 2)
    with pytest.raises(UsageError, match="matches 3 tensors, and this figure shows at most 2"):
        run.plot("*", style="evolution")
    assert run.plot("param/*", style="evolution")
