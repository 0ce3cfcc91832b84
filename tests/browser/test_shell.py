"""The frame around every page: URLs, keyboard shortcuts, themes, the connection."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


def test_token_signs_in_and_is_removed_from_the_url(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"))
    expect(page.get_by_role("link", name="small-gpt", exact=True)).to_be_visible()
    assert "token" not in page.url


def test_page_without_a_token_explains_what_to_do(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{demo_server.base}/", allow=("401",))
    expect(page.get_by_role("alert")).to_contain_text("sonde ui")


def test_question_mark_lists_shortcuts_and_escape_closes(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"))
    expect(page.get_by_role("table")).to_be_visible()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Compare selected runs")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_every_view_can_be_reached_by_keys(
    open_run: Callable[..., Any], demo_server: Any, open_page: Callable[..., Any]
) -> None:
    page = open_run("small-gpt")
    expect(page.get_by_role("heading", name="small-gpt")).to_be_visible()
    for keys, path in [
        ("gl", "/layers"),
        ("gt", "/tensor/0"),
        ("gf", "/flow"),
        ("gd", "/findings"),
        ("gc", "/compare"),
    ]:
        for key in keys:
            page.keyboard.press(key)
        expect(page).to_have_url(re.compile(f"{path}($|\\?)"))
        if keys == "gc":
            page.go_back()
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page).to_have_url(re.compile(r"/run/[0-9a-f]+$"))
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(page).to_have_url(f"{demo_server.base}/")


def test_t_toggles_the_theme_and_it_persists(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"), color_scheme="light")
    root = page.locator("html")
    expect(root).to_have_attribute("data-theme", "light")
    expect(page.get_by_role("table")).to_be_visible()
    page.keyboard.press("t")
    expect(root).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(root).to_have_attribute("data-theme", "dark")


def test_dark_mode_follows_the_system(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"), color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_unknown_run_links_to_all_runs(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"), allow=("404",))
    expect(page.get_by_role("table")).to_be_visible()
    page.goto(f"{demo_server.base}/run/0000000000000000")
    expect(page.get_by_text("Run not found")).to_be_visible()
    views = page.get_by_role("navigation", name="Views")
    expect(views.get_by_role("link")).to_have_text(["Runs", "Compare"])  # and no views of a run that does not exist
    page.get_by_role("link", name="See all runs").click()
    expect(page.get_by_role("table")).to_be_visible()


def test_lost_connection_is_shown_and_restored(
    demo_runs: Path, serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    with serve(demo_runs) as server:
        page = open_page(server.at("/"), allow=("ERR_", "Failed to load"))
        expect(page.get_by_role("table")).to_be_visible()
        port = int(server.base.rpartition(":")[2])
    banner = page.get_by_text("The server is not responding.")
    expect(banner).to_be_visible()
    with serve(demo_runs, port=port):
        expect(banner).to_be_hidden(timeout=30_000)  # automatically, with its existing cookie
        page.get_by_role("link", name="small-gpt", exact=True).click()
        expect(page.get_by_role("heading", name="small-gpt")).to_be_visible()
        page.close()
