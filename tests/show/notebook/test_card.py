"""The card of a notebook: what is wrong on it, no script in it, nothing loaded, never an exception out of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from sonde.distribution import DOCS_URL
from sonde.show.notebook.curve import curve


def falling(step: int) -> float:
    return 3.0 / (1 + step)


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.depth = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.depth += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1


def test_card_says_what_is_wrong_and_what_to_do(hostile_run: Path) -> None:
    shown = sonde.open(hostile_run)._repr_html_()
    for word in ("gpt/baseline", "finished", "40 steps", "health", "nan_inf", "layers.1.weight", "<b>Fix:</b>", "<svg"):
        assert word in shown


def test_code_in_a_remedy_is_shown_as_code(hostile_run: Path) -> None:
    shown = sonde.open(hostile_run)._repr_html_()
    assert "(use <code>clamp_min</code>)" in shown
    assert "`" not in shown


def test_card_has_no_script_and_loads_nothing(hostile_run: Path) -> None:
    elements = Elements(sonde.open(hostile_run)._repr_html_())
    assert not {"script", "img", "iframe", "link", "object"} & set(elements.tags)
    names = {name for name, _ in elements.attributes}
    assert not [name for name in names if name.startswith("on")]
    assert "src" not in names
    assert all(str(value).startswith(f"{DOCS_URL}/rules/") for name, value in elements.attributes if name == "href")
    assert elements.depth == 0, "every element that is opened is closed"


def test_every_rule_of_its_style_is_about_the_card(hostile_run: Path) -> None:
    style = re.search(r"<style>(.*?)</style>", sonde.open(hostile_run)._repr_html_())
    assert style is not None
    assert all(rule.startswith(".sonde-card") for rule in style[1].split("}") if rule)


def test_notebook_gets_the_card_and_a_line_of_text(hostile_run: Path) -> None:
    found = sonde.open(hostile_run)._repr_mimebundle_(include=None, exclude=None)
    assert found["text/html"].startswith('<div class="sonde-card">')
    assert found["text/plain"].startswith("Run(")


def test_notebook_of_ipython_shows_it(hostile_run: Path) -> None:
    formatters = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed")
    data, _ = formatters.DisplayFormatter().format(sonde.open(hostile_run))
    assert "sonde-card" in data["text/html"]


def test_run_without_anything_has_a_card(begin: Any) -> None:
    shown = sonde.open(begin(layers=()).finish())._repr_html_()
    assert "No loss was logged" in shown
    assert "no steps yet" in shown


def test_damaged_run_has_a_card_that_names_the_damage(begin: Any) -> None:
    path = begin().steps(40, falling).finish()
    for file in path.glob("stats/*/seg-*.parquet"):
        file.write_bytes(b"x" * 100)
    shown = sonde.open(path)._repr_html_()
    assert "⚠" in shown
    assert "gpt/baseline" in shown


@pytest.mark.parametrize(
    "values", [[1.0], [0.0, 0.0], [np.nan, 1.0, np.inf], [-1.7e308, 1.7e308], [1e-300, 1e300], list(range(10_000))]
)
def test_any_loss_has_a_picture_within_its_frame(values: list[float]) -> None:
    drawn = curve((np.arange(len(values)), np.array(values, float)))
    points = re.search(r'points="([^"]*)"', drawn)
    assert points is not None
    places = np.array([pair.split(",") for pair in points[1].split()], float)
    assert (places >= 0).all()
    assert (places <= [480, 64]).all()
    assert len(drawn) < 20_000


def test_loss_that_is_never_finite_has_no_picture() -> None:
    assert curve((np.arange(3), np.full(3, np.nan))) == ""
