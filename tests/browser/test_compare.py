"""Compare: first divergence, differing settings, curves and layer ratios."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sonde

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


@pytest.fixture
def compare(demo_server: Any, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Open the comparison of runs by name."""

    def go(*names: str, query: str = "", **options: Any) -> Any:
        page = open_page(demo_server.at("/"), **options)
        hrefs = [page.get_by_role("link", name=name, exact=True).get_attribute("href") for name in names]
        ids = ",".join(href.rsplit("/", 1)[1] for href in hrefs)
        page.goto(f"{demo_server.base}/compare?ids={ids}{query}")
        return page

    return go


def test_first_divergence_is_shown_with_both_values(
    compare: Any, demo_runs: Path, picture: Callable[..., None]
) -> None:
    page = compare("fine", "spoilt")
    runs = [sonde.open(f"thirds/{name}", dir=demo_runs) for name in ("fine", "spoilt")]
    first = sonde.compare(*runs).first_divergence
    assert first is not None
    card = page.locator(".divergence")
    expect(card).to_contain_text(f"spoilt first differs at step {first.step}")
    expect(card.locator("dd").last).to_contain_text("e+25")
    expect(page.locator('.heat[data-ready="true"]')).to_be_visible()
    picture(page, "compare")


def test_equal_settings_are_hidden_by_default(compare: Any) -> None:
    page = compare("fine", "hot")
    table = page.get_by_role("region", name="Settings")
    expect(table.get_by_role("rowheader")).to_have_text(["lr"])
    expect(table.get_by_role("row").last).to_contain_text("0.3")
    page.get_by_label("Show equal settings").check()
    expect(table.get_by_role("rowheader", name="dim")).to_be_visible()


def test_metrics_are_compared_and_select_the_curve(compare: Any) -> None:
    page = compare("fine", "hot")
    table = page.get_by_role("region", name="Metrics")
    expect(table.get_by_role("columnheader")).to_have_text(["Metric", "fine", "hot"])
    table.get_by_role("button", name="val/accuracy").click()
    expect(page).to_have_url(re.compile("scalar=val"))
    chart = page.locator("figure").filter(has_text="val/accuracy")
    expect(chart.locator(".legend li")).to_have_text(["fine", "hot"])


def test_ratio_is_orange_where_the_second_run_is_larger(compare: Any) -> None:
    page = compare("fine", "hot", query="&kind=update&stat=rms")
    heat = page.get_by_role("application", name=re.compile("^update rms, ratio of hot to fine"))
    expect(page.locator('.heat[data-ready="true"]')).to_be_visible()
    heat.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("figcaption [role=status]")).to_have_text(re.compile(r"embed\.weight · step 0: ×(\d\d|[2-9])"))
    red, _, blue = page.evaluate(
        """() => {
            const canvas = document.querySelector('.heat .box > canvas');
            const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
            copy.drawImage(canvas, 1, 1, 1, 1, 0, 0, 1, 1);
            return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }"""
    )
    assert red > blue


def test_three_runs_can_be_compared_and_one_removed(compare: Any) -> None:
    page = compare("fine", "hot", "spoilt")
    expect(page.locator(".divergence")).to_have_count(2)
    page.get_by_role("button", name="Remove hot").click()
    expect(page.locator(".divergence")).to_have_count(1)
    page.go_back()
    expect(page.locator(".divergence")).to_have_count(2)


def test_a_single_run_needs_a_second_one(compare: Any) -> None:
    page = compare("fine")
    expect(page.get_by_text("Choose a second run to compare")).to_be_visible()
    page.get_by_label("Add a run").select_option(index=1)
    expect(page.get_by_role("heading", name=re.compile("First divergence from fine"))).to_be_visible()


def test_different_models_are_compared_where_possible(compare: Any) -> None:
    page = compare("fine", "small-gpt", query="&kind=act")
    expect(page.get_by_role("heading", name="Settings")).to_be_visible()
    expect(page.get_by_role("region", name="Metrics").get_by_role("rowheader", name="loss", exact=True)).to_be_visible()
    expect(page.get_by_text(re.compile("series only in"))).to_be_visible()


def test_narrow_screen_has_no_sideways_scroll(compare: Any) -> None:
    page = compare("fine", "hot", width=360, height=740)
    expect(page.locator('.heat[data-ready="true"]')).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
