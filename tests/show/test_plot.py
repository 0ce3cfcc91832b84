"""Figures: lines or a heatmap, a logarithmic axis where it helps, NaN in sight, text as text, no setting changed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pytest

import sonde
from sonde.errors import MissingPackageError, UnknownNameError, UsageError
from sonde.run import Table
from sonde.show.plot.axes import short_names, spans_decades
from sonde.show.pooled import pool

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'sonde-ml[plot]'")


def falling(step: int) -> float:
    return 3.0 / (1 + step)


@pytest.fixture
def run(begin: Any) -> sonde.Run:
    return sonde.open(begin().steps(40, falling, val=lambda step: 1.0, nan_at=20).finish())


def lines_of(figure: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_few_series_are_lines_with_their_values(run: sonde.Run) -> None:
    lines = lines_of(run.plot(["loss", "val/loss"]))
    assert list(lines) == ["loss", "val/loss"]
    np.testing.assert_allclose(lines["loss"].get_ydata(), [falling(step) for step in range(40)])
    assert list(lines["val/loss"].get_xdata()) == list(range(0, 40, 5))


def test_many_series_are_a_heatmap(begin: Any) -> None:
    layers = [f"layers.{n}.weight" for n in range(20)]
    run = sonde.open(begin(layers=layers, kinds=("grad",)).steps(10, falling).finish())
    figure = run.plot("grad/*/rms")
    assert figure.axes[0].images[0].get_array().shape == (20, 10)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == layers
    assert not run.plot("grad/*/rms", style="lines").axes[0].images


def test_axis_is_logarithmic_where_values_span_decades(run: sonde.Run) -> None:
    assert run.plot("grad/*/rms").axes[0].get_yscale() == "log"
    assert run.plot("param/*/rms").axes[0].get_yscale() == "linear"
    assert run.plot("param/*/rms", log=True).axes[0].get_yscale() == "log"


def test_nan_in_a_tensor_is_marked_at_its_step(run: sonde.Run) -> None:
    marks = lines_of(run.plot("grad/*/rms"))["non-finite"]
    assert list(marks.get_xdata()) == [20]
    assert "non-finite" not in lines_of(run.plot("param/*/rms"))


def test_nan_colours_its_cell_of_the_heatmap_and_no_other(run: sonde.Run) -> None:
    figure = run.plot("grad/*/rms", style="heatmap")
    odd = np.argwhere(figure.axes[0].images[1].get_array().filled(0))
    assert odd.tolist() == [[2, 20]]
    assert "NaN" in figure.axes[0].get_xlabel()


def test_pooling_keeps_the_largest_and_every_nan(run: sonde.Run) -> None:
    pooled = pool(run, "grad/*/rms", width=4)
    assert pooled.sites[0] == "grad/embed.weight"
    assert pooled.values.shape == (5, 4)
    whole = pool(run, "grad/*/rms", width=40)
    np.testing.assert_allclose(pooled.values, whole.values.reshape(5, 4, 10).max(axis=2))
    assert np.argwhere(pooled.is_odd).tolist() == [[2, 2]]


def test_svg_holds_text_as_text_and_is_the_same_twice(run: sonde.Run, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        run.plot(["loss", "val/loss"]).savefig(tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    words = [node.text for node in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss", "val/loss", "step", "gpt/baseline"} <= set(words)
    assert text == (tmp_path / "b.svg").read_text()


def test_notebook_shows_a_picture(run: sonde.Run) -> None:
    assert run.plot("loss")._repr_png_().startswith(b"\x89PNG")


def test_name_is_never_a_formula(begin: Any, tmp_path: Path) -> None:
    layers = [r"a$\frac{1}{0}$.weight", "<script>alert(1)</script>.weight"]
    run = sonde.open(begin(layers=layers, kinds=("grad",)).steps(3, falling).finish())
    for style in ("lines", "heatmap"):
        run.plot("grad/*/rms", style=style, log=False).savefig(tmp_path / "x.svg")
        text = (tmp_path / "x.svg").read_text()
        assert r"$\frac{1}{0}$" in text
        assert "<script" not in text


@pytest.mark.parametrize("scale", [0.0, np.nan, 1e300])
def test_odd_values_are_drawn_all_the_same(begin: Any, scale: float) -> None:
    run = sonde.open(begin(layers=()).steps(5, lambda step: scale).finish())
    assert run.plot("loss")._repr_png_()


def test_settings_of_matplotlib_stay_as_they_were(run: sonde.Run, tmp_path: Path) -> None:
    program = f"""
import sys, matplotlib, sonde
before = matplotlib.rcParams.copy()  # a dict of it would choose a backend
run = sonde.open({str(run.path)!r})
run.plot("grad/*/rms", style="heatmap").savefig({str(tmp_path / "x.png")!r})
assert matplotlib.rcParams.copy() == before
assert "matplotlib.pyplot" not in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_wrong_questions_say_what_there_is(run: sonde.Run) -> None:
    with pytest.raises(UnknownNameError, match=r"embed\.weight"):
        run.plot("grad/embd.weight/rms")
    with pytest.raises(UnknownNameError, match="loss"):
        run.plot("los")
    with pytest.raises(UsageError, match="one stat"):
        run.plot("loss", style="heatmap")
    with pytest.raises(UnknownNameError, match="heatmap"):
        run.plot("loss", style="pie")
    with pytest.raises(UsageError, match=r"nothing in .* matches"):
        run.plot("none*")


def test_decades() -> None:
    assert spans_decades([np.array([1e-4, 1.0, np.nan])])
    assert not spans_decades([np.array([1.0, 20.0])])
    assert not spans_decades([np.array([-1.0, 1e9])])
    assert not spans_decades([np.empty(0)])
    spike = np.ones(1000)
    spike[500] = 1e6
    assert spans_decades([spike])


def test_names_are_shortened_to_what_differs() -> None:
    assert short_names(["grad/a/rms", "param/a/rms"]) == (["grad/a", "param/a"], "rms")
    assert short_names(["loss"]) == (["loss"], "loss")
    assert short_names(["loss", "val/loss"]) == (["loss", "val/loss"], "")


def test_one_step_has_no_fractions_of_a_step(begin: Any) -> None:
    run = sonde.open(begin().steps(1, lambda step: 1.0).finish())
    figure = run.plot("loss")
    figure.canvas.draw()
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


# --------------------------------------------------------------------------------------------------------------- tables


def test_table_of_stats_has_a_line_for_each_site(hostile_run: Path) -> None:
    axes = sonde.open(hostile_run).stats("grad/*/norm").plot(title="gradients").axes[0]
    sites = ["embed.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "head.weight"]
    assert axes.get_legend_handles_labels()[1] == sites
    assert (axes.get_ylabel(), axes.get_yscale(), axes.get_title(loc="left")) == ("grad norm", "log", "gradients")


def test_table_of_scalars_has_a_line_for_each_name(hostile_run: Path) -> None:
    axes = sonde.open(hostile_run).scalars(["loss", "lr"]).plot(log=False).axes[0]
    assert axes.get_legend_handles_labels()[1] == ["loss", "lr"]
    assert axes.lines[0].get_ydata()[0] == 3.0
    assert axes.get_yscale() == "linear"


def test_table_of_sql_has_a_line_for_each_column_of_numbers(hostile_run: Path) -> None:
    query = "select norm, step, rms from stats where kind = 'grad' and site = 'head.weight' order by step desc"
    axes = sonde.open(hostile_run).sql(query).plot().axes[0]
    assert axes.get_legend_handles_labels()[1] == ["norm", "rms"]
    assert list(axes.lines[0].get_xdata()[:3]) == [0, 1, 2]


def test_table_with_many_series_says_how_many_it_draws(hostile_run: Path) -> None:
    axes = sonde.open(hostile_run).stats("*/*/n*").plot(title="all").axes[0]
    assert len([line for line in axes.lines if line.get_label() != "non-finite"]) == 12
    assert re.fullmatch(r"all, 12 of \d\d series", axes.get_title(loc="left"))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"site": ["a"], "score": [1.0]},
            "needs a column `step` and a column of numbers, and the table has site, score",
        ),
        ({"step": [1], "site": ["a"]}, "a column of numbers"),
        ({"step": [], "value": []}, "no rows"),
    ],
)
def test_table_that_cannot_be_drawn_says_why(table: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        Table(pa.table(table)).plot()


def test_table_without_matplotlib_says_how_to_install_it(hostile_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = sonde.open(hostile_run).scalars("loss")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"pip install .*\[plot\]"):
        table.plot()
