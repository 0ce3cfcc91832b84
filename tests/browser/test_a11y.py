"""What axe-core finds, in both themes and on a phone; a walk through the page with the keyboard alone."""

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
    expect(page.locator("main")).not_to_contain_text("Opening the run")
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


def test_axe_does_complain(open_page: Callable[..., Any], demo_server: Any, axe: Callable[..., list[str]]) -> None:
    page = open_page(demo_server.at("/"))
    expect(page.locator("a[data-run]")).to_have_count(4)
    page.evaluate("() => document.querySelector('main').append(document.createElement('button'))")
    assert any("button-name" in complaint for complaint in axe(page))


def test_tab_reaches_everything_and_the_focus_can_be_seen(open_run: Callable[..., Any]) -> None:
    page = open_run("small-gpt")
    expect(page.locator(".uplot").first).to_be_visible()
    page.wait_for_timeout(500)
    seen: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        told = page.evaluate(
            """() => {
                const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
                const name = at.getAttribute('aria-label') || at.textContent.trim() || at.tagName;
                const visible = style.outlineStyle !== 'none' || at.matches('.mark');
                return [at === document.body ? '' : name.slice(0, 60), visible, box.width > 0];
            }"""
        )
        if not told[0]:
            break
        assert told[1], f"the focus on {told[0]!r} cannot be seen"
        assert told[2], f"{told[0]!r} has the focus and no size"
        seen.append(told[0])
    words = "\n".join(seen)
    for wanted in ("Skip to content", "Findings", "loss, line chart", "Map of"):
        assert wanted in words, words
