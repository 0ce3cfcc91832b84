"""Accessibility: axe-core in both themes and on a phone, and keyboard navigation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser

VIEWS = ["", "/findings", "/layers", "/tensor/0", "/flow"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_run(open_run: Callable[..., Any], axe: Callable[..., list[str]], view: str, scheme: str) -> None:
    page = open_run("small-gpt", view, color_scheme=scheme, reduced_motion="reduce")
    expect(page.locator("main")).not_to_contain_text("Loading run…")
    page.wait_for_timeout(1000)
    assert not axe(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_list_and_comparison(
    demo_server: Any, open_page: Callable[..., Any], axe: Callable[..., list[str]], scheme: str
) -> None:
    page = open_page(demo_server.at("/"), color_scheme=scheme)
    expect(page.locator("a[data-run]")).to_have_count(4)
    assert not axe(page)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    assert not axe(page)
    page.keyboard.press("Escape")
    for key in "jxjxc":
        page.keyboard.press(key)
    expect(page.get_by_role("heading").first).to_be_attached()
    page.wait_for_timeout(1000)
    assert not axe(page)


def test_phone(open_run: Callable[..., Any], axe: Callable[..., list[str]]) -> None:
    page = open_run("small-gpt", width=360, height=780)
    expect(page.locator(".uplot").first).to_be_visible()
    assert not axe(page)


def test_axe_reports_violations(open_page: Callable[..., Any], demo_server: Any, axe: Callable[..., list[str]]) -> None:
    page = open_page(demo_server.at("/"))
    expect(page.locator("a[data-run]")).to_have_count(4)
    page.evaluate("() => document.querySelector('main').append(document.createElement('button'))")
    assert any("button-name" in complaint for complaint in axe(page))


def test_tab_reaches_everything_with_visible_focus(open_run: Callable[..., Any]) -> None:
    page = open_run("small-gpt")
    expect(page.locator(".uplot").first).to_be_visible()
    page.wait_for_timeout(500)
    seen: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, is_visible, has_size = page.evaluate(
            """() => {
                const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
                const name = at.getAttribute('aria-label') || at.textContent.trim() || at.tagName;
                const visible = style.outlineStyle !== 'none' || at.matches('.mark');
                return [at === document.body ? '' : name.slice(0, 60), visible, box.width > 0];
            }"""
        )
        if not name:
            break
        assert is_visible, f"the focus on {name!r} is not visible"
        assert has_size, f"{name!r} has the focus but no size"
        seen.append(name)
    words = "\n".join(seen)
    for wanted in ("Skip to content", "Findings", "loss, line chart", "Heatmap of"):
        assert wanted in words, words
