"""The frame of every page: addresses, keys, themes, the connection."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


def test_token_signs_in_and_leaves_the_address(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"))
    expect(page.get_by_role("link", name="small-gpt", exact=True)).to_be_visible()
    assert "token" not in page.url


def test_without_a_token_the_page_says_what_to_do(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{demo_server.base}/", allow=("401",))
    expect(page.get_by_role("alert")).to_contain_text("sonde ui")


def test_question_mark_lists_the_keys_and_escape_closes(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"))
    expect(page.get_by_role("table")).to_be_visible()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("compare what is selected")
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


def test_t_changes_the_theme_and_it_is_remembered(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"), color_scheme="light")
    root = page.locator("html")
    expect(root).to_have_attribute("data-theme", "light")
    expect(page.get_by_role("table")).to_be_visible()
    page.keyboard.press("t")
    expect(root).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(root).to_have_attribute("data-theme", "dark")


def test_dark_by_system(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"), color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_unknown_pages_and_runs_say_where_to_go(demo_server: Any, open_page: Callable[..., Any]) -> None:
    page = open_page(demo_server.at("/"), allow=("404",))
    expect(page.get_by_role("table")).to_be_visible()
    page.goto(f"{demo_server.base}/run/0000000000000000")
    expect(page.get_by_text("There is no such run here.")).to_be_visible()
    page.get_by_role("link", name="the list of runs").click()
    expect(page.get_by_role("table")).to_be_visible()


def test_server_that_goes_away_is_told_and_found_again(
    demo_runs: Path, serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    with serve(demo_runs) as server:
        page = open_page(server.at("/"), allow=("ERR_", "Failed to load"))
        expect(page.get_by_role("table")).to_be_visible()
        port = int(server.base.rpartition(":")[2])
    banner = page.get_by_text("The server does not answer.")
    expect(banner).to_be_visible()
    with serve(demo_runs, port=port):
        expect(banner).to_be_hidden(timeout=30_000)  # by itself, with the cookie it has
        page.get_by_role("link", name="small-gpt", exact=True).click()
        expect(page.get_by_role("heading", name="small-gpt")).to_be_visible()
        page.close()
