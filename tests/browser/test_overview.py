"""The overview of a run: the answer first, and charts that hold still."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


def test_opens_on_what_is_wrong_where_since_when_and_the_remedy(
    open_run: Callable[..., Any], picture: Callable[..., None]
) -> None:
    page = open_run("small-gpt")
    answer = page.get_by_role("region", name="What is wrong")
    expect(answer).to_contain_text("nan inf")
    expect(answer).to_contain_text("since step 35")
    expect(answer).to_contain_text("blocks.2.mlp.1")
    expect(answer).to_contain_text("look at blocks.2.mlp.1")
    expect(page.locator(".uplot").first).to_be_visible()
    expect(page.get_by_text("it ends as NaN or Inf, first at step 35")).to_be_visible()
    page.wait_for_timeout(500)
    picture(page, "overview")


def test_healthy_run_says_that_nothing_is_wrong(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    expect(page.get_by_role("heading", name=re.compile("Nothing"))).to_be_visible()
    expect(page.get_by_text("lr", exact=True).first).to_be_visible()


def test_zoom_is_in_the_address_and_survives_a_reload(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    chart = page.get_by_role("application", name=re.compile("^loss"))
    expect(chart.locator("canvas")).to_be_visible()
    chart.focus()
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    zoomed = page.url
    page.reload()
    expect(page.get_by_role("button", name="all").first).to_be_visible()
    assert page.url == zoomed
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))


def test_arrow_keys_read_exact_values_aloud(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    chart = page.get_by_role("application", name=re.compile("^loss"))
    expect(chart.locator("canvas")).to_be_visible()
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    read_out = page.locator("figure", has=chart).locator("[aria-live]")
    expect(read_out).to_contain_text(re.compile(r"step 1: loss \d\.\d+"))


def test_table_behind_a_chart(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    page.get_by_role("button", name="Table of loss").click()
    table = page.get_by_role("region", name="Values of loss").get_by_role("table")
    expect(table.get_by_role("row")).not_to_have_count(0)
    expect(table.get_by_role("row").nth(1).get_by_role("rowheader")).to_have_text("0")


def test_chart_does_not_move_under_the_cursor_and_follows_when_left(
    live_training: tuple[Path, Any], serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    folder, _ = live_training
    with serve(folder) as server:
        page = open_page(server.at("/"))
        page.get_by_role("link", name="alive", exact=True).click()
        chart = page.get_by_role("application", name=re.compile("^loss"))
        expect(page.get_by_text("rules looked at")).to_be_visible()
        expect(chart.locator("canvas")).to_be_visible()
        chart.hover()
        pill = page.locator("figure", has=chart).get_by_role("button", name="new data")
        expect(pill).to_be_visible(timeout=30_000)
        page.mouse.move(2, 2)
        expect(pill).to_be_hidden()
        page.close()  # before its server


def test_phone_width_has_no_sideways_scroll(open_run: Callable[..., Any], picture: Callable[..., None]) -> None:
    page = open_run("small-gpt", width=360, height=780)
    expect(page.get_by_role("region", name="What is wrong")).to_be_visible()
    expect(page.locator(".uplot").first).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    picture(page, "overview-phone")


def test_overview_is_a_small_transfer(open_run: Callable[..., Any]) -> None:
    page = open_run("small-gpt")
    expect(page.locator(".uplot").first).to_be_visible()
    page.wait_for_load_state("load")
    page.wait_for_timeout(1500)
    total = page.evaluate(
        "() => performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
        ".reduce((sum, entry) => sum + entry.transferSize, 0)"
    )
    assert 0 < total <= 1.5e6
