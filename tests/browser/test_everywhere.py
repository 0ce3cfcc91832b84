"""All views on all kinds of runs: no console errors, and no script injection through names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser

VIEWS = {
    "": "Recording overhead",
    "/findings": "Findings",
    "/layers": "grad",
    "/tensor/0": "rms",
    "/flow": "",
}


@pytest.fixture(scope="module")
def hostile_server(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> Iterator[Any]:
    from hostile_run import hostile_run

    folder = tmp_path_factory.mktemp("hostile")
    hostile_run(folder)
    with serve(folder) as server:
        yield server


@pytest.fixture(scope="module")
def big_server(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> Iterator[Any]:
    from big_run import Plan, big_run

    folder = tmp_path_factory.mktemp("big")
    big_run(folder, Plan(num_tensors=2000, num_steps=600, num_extra_scalars=300))
    with serve(folder) as server:
        yield server


def visit_all_views(page: Any, server: Any, *, width: int = 1280) -> None:
    """Open all views of the first run of a server, and the Compare view."""
    page.goto(server.at("/"))
    first = page.locator("a[data-run]").first
    expect(first).to_be_visible()
    href = first.get_attribute("href")
    for view, word in VIEWS.items():
        page.goto(f"{server.base}{href}{view}")
        expect(page.locator("main")).not_to_contain_text("Loading run…")
        expect(page.locator("main")).to_contain_text(word)
        expect(page.get_by_text("This view failed")).to_have_count(0)
        page.wait_for_timeout(700)
        assert page.evaluate("() => window.hacked") is None
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width, view
    page.goto(f"{server.base}/compare?ids={href.rpartition('/')[2]}")
    expect(page.locator("main")).not_to_be_empty()


@pytest.mark.parametrize("width", [1280, 360])
def test_hostile_names_are_shown_as_text(hostile_server: Any, open_page: Callable[..., Any], width: int) -> None:
    page = open_page(width=width)
    visit_all_views(page, hostile_server, width=width)
    page.goto(f"{hostile_server.base}/")
    expect(page.get_by_role("link", name=re.compile("<img src=x"))).to_be_visible()


def test_axe_on_hostile_names(
    hostile_server: Any, open_page: Callable[..., Any], axe: Callable[..., list[str]]
) -> None:
    page = open_page(hostile_server.at("/"))
    page.locator("a[data-run]").first.click()
    expect(page.get_by_text("Recording overhead")).to_be_visible()
    assert not axe(page)


def test_two_thousand_tensors(big_server: Any, open_page: Callable[..., Any]) -> None:
    visit_all_views(open_page(), big_server)


def test_charts_of_hundreds_of_metrics_are_fetched_on_scroll(big_server: Any, open_page: Callable[..., Any]) -> None:
    asked: list[str] = []
    page = open_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(big_server.at("/"))
    page.locator("a[data-run]").first.click()
    expect(page.get_by_text("Recording overhead")).to_be_visible()
    page.wait_for_timeout(1000)
    before = len([url for url in asked if "/scalars" in url])
    assert before < 12
    page.get_by_role("heading", name="Metrics", exact=True).scroll_into_view_if_needed()
    page.mouse.wheel(0, 600)
    page.wait_for_timeout(1000)
    assert before < len([url for url in asked if "/scalars" in url]) < 40


def test_run_in_progress(
    live_training: tuple[Path, Any], serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    folder, _ = live_training
    with serve(folder) as server:
        page = open_page()
        visit_all_views(page, server)
        page.goto(server.at("/"))
        steps = page.get_by_role("row").nth(1).get_by_role("cell").nth(6)
        before = int(steps.inner_text().replace(",", ""))
        expect(steps).not_to_have_text(f"{before:,}", timeout=15_000)
        page.close()


def test_hidden_tab_closes_its_event_stream(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"))
    expect(page.locator("a[data-run]").first).to_be_visible()
    with page.expect_event("requestfailed", predicate=lambda request: request.url.endswith("/api/events")):
        page.evaluate(
            """() => {
                Object.defineProperty(document, 'hidden', {value: true, configurable: true});
                document.dispatchEvent(new Event('visibilitychange'));
            }"""
        )
