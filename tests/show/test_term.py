"""What the terminal shows: shapes of series, numbers in few characters, names that can do no harm."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sonde.show.term.number import age, duration, number, percent, size
from sonde.show.term.sparkline import ASCII, BLOCKS, sparkline
from sonde.show.term.table import Column, status_text, table
from sonde.show.term.text import plain


def test_sparkline_rises_with_its_values() -> None:
    assert sparkline(range(8)) == BLOCKS
    assert sparkline(range(7, -1, -1)) == BLOCKS[::-1]


def test_long_series_is_squeezed_into_the_width() -> None:
    assert sparkline(np.linspace(0, 1, 10_000), 8) == BLOCKS
    assert len(sparkline(np.zeros(10_000), 16)) == 16


def test_nonfinite_value_cannot_hide_in_a_long_series() -> None:
    values = np.ones(10_000)
    values[5000] = np.nan
    assert sparkline(values, 10).count("×") == 1
    values[5000] = np.inf
    assert sparkline(values, 10).count("×") == 1


def test_sparklines_of_little() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0], 0) == ""
    assert sparkline([3.0]) == "▄"
    assert sparkline([np.nan, np.nan]) == "××"


def test_sparkline_of_huge_values_does_not_overflow() -> None:
    assert sparkline([-1.7e308, 1.7e308]) == "▁█"


def test_sparkline_can_do_without_unicode() -> None:
    assert sparkline(range(8), ascii=True) == ASCII
    assert sparkline([np.nan], ascii=True) == "x"


@given(st.lists(st.floats(), max_size=100), st.integers(1, 40))
def test_sparkline_is_as_long_as_it_should_be(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


@pytest.mark.parametrize(
    "name", ["\x1b[2J", "a\nb", "a\rb", "\x07", "\x9b31m", "a\u202eb", "\u2028", "\u200b", "\ud800", "\x00"]
)
def test_unprintable_characters_are_spelled_out(name: str) -> None:
    shown = plain(name)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert shown != name


@given(st.text(st.characters()))
def test_any_name_is_shown_on_one_line(name: str) -> None:
    assert not set(plain(name)) & set("\x1b\n\r\x07\x9b\u202e")


@pytest.mark.parametrize("name", ["layers.0.weight", "größe", "損失", "loss 😀", "[red]x[/red]", "a\\b"])
def test_visible_characters_stay(name: str) -> None:
    assert plain(name) == name


def test_long_names_are_cut_where_asked() -> None:
    assert plain("x" * 100, limit=10) == "x" * 9 + "…"


def draw(renderable: object, **options: object) -> str:
    console = Console(file=io.StringIO(), width=60, **options)  # type: ignore[arg-type]
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_cells_are_never_markup() -> None:
    drawn = draw(table([Column("name")], [["[red]x[/red]"], ["[link=http://example.org]y"], ["\x1b[31mz"]]))
    assert "[red]x[/red]" in drawn
    assert "[link=http://example.org]y" in drawn
    assert "\x1b" not in drawn


def test_status_has_a_colour_where_there_are_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in draw(status_text("crashed"), force_terminal=True, color_system="standard")
    assert draw(status_text("crashed")).strip() == "crashed"


def test_numbers_in_few_characters() -> None:
    assert [number(x) for x in (0.0, -3.0, 1234.5, 1e-9, float("inf"), None)] == [
        "0",
        "-3",
        "1234",
        "1e-09",
        "inf",
        "–",
    ]
    assert percent(0.5) == "50 %"
    assert size(512) == "512 B"
    assert size(5 * 1024**4) == "5.0 TiB"


def test_clock_that_went_backwards_reads_as_no_time() -> None:
    assert duration(-5) == "0 s"
    assert age(-5) == "just now"
    assert duration(float("nan")) == age(None) == "–"
