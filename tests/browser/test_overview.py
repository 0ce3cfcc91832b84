"""The overview of a run: the top findings first, and charts that do not move under the cursor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


def test_top_findings_show_problem_location_step_and_remedy(
    open_run: Callable[..., Any], picture: Callable[..., None]
) -> None:
    page = open_run("small-gpt")
    problems = page.get_by_role("region", name="Problems found", exact=True)
    expect(problems).to_contain_text("nan inf")
    expect(problems).to_contain_text("since step 35")
    expect(problems.locator(".where").first).to_contain_text("blocks.2.mlp.1")
    expect(problems.locator(".remedy").first).to_contain_text("blocks.2.mlp.1")
    expect(page.locator(".uplot").first).to_be_visible()
    expect(page.locator(".trend")).to_contain_text("step 35")
    page.wait_for_timeout(500)
    picture(page, "overview")


def test_healthy_run_has_no_problems(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    expect(page.get_by_role("heading", name=re.compile("No (serious )?problems"))).to_be_visible()
    expect(page.get_by_text("lr", exact=True).first).to_be_visible()


def test_details_show_the_overhead_once_and_link_only_to_snapshots_that_exist(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    details = page.get_by_role("region", name="Recording overhead")
    expect(details).to_contain_text(re.compile(r"\d %|Not measured"))
    expect(page.get_by_text("Recording overhead")).to_have_count(1)
    expect(details).to_contain_text("no snapshots")
    expect(details.get_by_role("link")).to_have_count(0)


def test_zoom_is_in_the_url_and_survives_a_reload(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    chart = page.get_by_role("application", name=re.compile("^loss"))
    expect(chart.locator("canvas")).to_be_visible()
    chart.focus()
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile(r"from=\d+&to=\d+"))
    zoomed = page.url
    page.reload()
    expect(page.get_by_role("button", name="Reset zoom").first).to_be_visible()
    assert page.url == zoomed
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))


def test_arrow_keys_announce_exact_values(open_run: Callable[..., Any]) -> None:
    page = open_run("fine")
    chart = page.get_by_role("application", name=re.compile("^loss"))
    expect(chart.locator("canvas")).to_be_visible()
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    read_out = page.locator("figure", has=chart).locator("[aria-live]")
    expect(read_out).to_contain_text(re.compile(r"step 1: loss \d\.\d+"))


def test_chart_values_as_a_table(open_run: Callable[..., Any]) -> None:
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
        expect(page.get_by_text("checks ran on")).to_be_visible()
        expect(chart.locator("canvas")).to_be_visible()
        chart.hover()
        pill = page.locator("figure", has=chart).get_by_role("button", name="New data")
        expect(pill).to_be_visible(timeout=30_000)
        page.mouse.move(2, 2)
        expect(pill).to_be_hidden()
        page.close()  # before its server


def test_phone_width_has_no_sideways_scroll(open_run: Callable[..., Any], picture: Callable[..., None]) -> None:
    page = open_run("small-gpt", width=360, height=780)
    expect(page.get_by_role("region", name="Problems found", exact=True)).to_be_visible()
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
