"""The findings of a run: evidence, remedy, location, and their states."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


def test_finding_shows_evidence_remedy_and_location(open_run: Callable[..., Any], picture: Callable[..., None]) -> None:
    page = open_run("small-gpt", "/findings")
    card = page.get_by_role("article", name="nan inf")
    expect(card.get_by_role("table")).to_contain_text("nonfinite_fraction")
    expect(card.locator(".remedy")).to_contain_text("blocks.2.mlp.1")
    expect(card.locator(".uplot").first).to_be_visible()
    page.wait_for_timeout(500)
    picture(page, "findings")
    card.get_by_role("link", name=re.compile("blocks.2.mlp.1")).first.click()
    expect(page).to_have_url(re.compile(r"/tensor/\d+\?step=35"))


def test_remedy_can_be_copied(open_run: Callable[..., Any]) -> None:
    page = open_run("small-gpt", "/findings", permissions=["clipboard-read", "clipboard-write"])
    card = page.get_by_role("article", name="nan inf")
    card.get_by_role("button", name="Copy").click()
    expect(card.get_by_role("button", name="Copied")).to_be_visible()
    assert "blocks.2.mlp.1" in page.evaluate("() => navigator.clipboard.readText()")


def test_muting_hides_a_finding_persists_and_can_be_undone(open_run: Callable[..., Any]) -> None:
    page = open_run("hot", "/findings")
    cards = page.get_by_role("article")
    expect(cards.first).to_be_visible()
    before = cards.count()
    name = cards.first.get_by_role("heading", level=2).inner_text()
    page.keyboard.press("j")
    page.keyboard.press("m")
    # The selected finding stays visible; without it in the URL, the filter applies.
    expect(cards.first).to_contain_text("muted")
    page.goto(page.url.split("?")[0])
    expect(cards).to_have_count(before - 1)
    page.get_by_role("combobox", name="State").select_option("muted")
    expect(page.get_by_role("article", name=name)).to_be_visible()
    page.reload()
    page.get_by_role("article", name=name).get_by_role("button", name="Mute").click()
    page.goto(page.url.split("?")[0])
    expect(cards).to_have_count(before)


def test_filters_are_kept_in_the_url(open_run: Callable[..., Any]) -> None:
    page = open_run("hot", "/findings")
    expect(page.get_by_role("article").first).to_be_visible()
    page.get_by_label("Filter findings").fill("learning rate")
    page.get_by_role("group", name="Severity").get_by_role("button", name="info").click()
    expect(page).to_have_url(re.compile("severity=critical"))
    seen = page.get_by_role("article").count()
    page.reload()
    expect(page.get_by_role("article")).to_have_count(seen)
    expect(page.get_by_label("Filter findings")).to_have_value("learning rate")


def test_linked_finding_has_the_focus(open_run: Callable[..., Any]) -> None:
    page = open_run("hot")
    page.get_by_role("region", name="Problems found", exact=True).get_by_role("link").first.click()
    expect(page).to_have_url(re.compile(r"/findings\?f="))
    expect(page.locator("article:focus")).to_have_count(1)


def test_skipped_checks_are_listed(open_run: Callable[..., Any]) -> None:
    page = open_run("small-gpt", "/findings")
    page.locator("summary").filter(has_text="Not checked").click()
    expect(page.get_by_text(re.compile("validation loss")).first).to_be_visible()
