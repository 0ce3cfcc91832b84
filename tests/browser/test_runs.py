"""The list of runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


def names(page: Any) -> list[str]:
    return page.locator("a[data-run]").all_inner_texts()


@pytest.fixture
def page(demo_server: Any, open_page: Callable[..., Any]) -> Any:
    opened = open_page(demo_server.at("/"))
    expect(opened.locator("a[data-run]")).to_have_count(4)
    return opened


def test_row_shows_status_loss_and_findings(page: Any, picture: Callable[..., None]) -> None:
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="small-gpt", exact=True))
    expect(row).to_contain_text("finished")
    expect(row).to_contain_text("NaN")
    expect(row).to_contain_text("critical")
    expect(row.locator("svg path").first).to_have_attribute("d", re.compile("^M"))
    page.set_viewport_size({"width": 1280, "height": 380})
    picture(page, "runs")


def test_filter_sort_and_group_are_kept_in_the_url(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("thirds")
    expect(page.locator("a[data-run]")).to_have_count(3)
    page.get_by_role("button", name="Run", exact=False).first.click()
    page.get_by_label("Group by").select_option("config:lr")
    expect(page.get_by_text("lr = 0.3")).to_be_visible()
    seen = names(page)
    page.reload()
    expect(page.locator("a[data-run]")).to_have_count(3)
    assert names(page) == seen
    expect(page.get_by_label("Filter runs")).to_have_value("thirds")


def test_sorting_by_name_and_back(page: Any) -> None:
    header = page.get_by_role("columnheader", name="Run")
    header.get_by_role("button").click()
    assert names(page) == sorted(names(page), key=str.lower)
    expect(header).to_have_attribute("aria-sort", "ascending")
    header.get_by_role("button").click()
    assert names(page) == sorted(names(page), key=str.lower, reverse=True)


def test_keys_move_select_and_compare(page: Any) -> None:
    for key in "jxjxc":
        page.keyboard.press(key)
    expect(page).to_have_url(re.compile(r"/compare\?ids=[0-9a-f]+(,|%2C)[0-9a-f]+"))


def test_filter_without_matches_has_an_empty_state(page: Any) -> None:
    page.get_by_label("Filter runs").fill("no such run")
    expect(page.get_by_text("No runs match this filter")).to_be_visible()
    page.get_by_role("button", name="Clear filter").click()
    expect(page.locator("a[data-run]")).to_have_count(4)


def test_delete_can_be_undone(
    demo_runs: Path, tmp_path: Path, serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    shutil.copytree(demo_runs / "thirds", tmp_path / "runs" / "thirds")
    with serve(tmp_path / "runs") as server:
        page = open_page(server.at("/"))
        expect(page.locator("a[data-run]")).to_have_count(3)
        page.get_by_role("row").filter(has_text="hot").hover()
        page.get_by_role("button", name="Delete hot").click()
        expect(page.locator("a[data-run]")).to_have_count(2)
        assert not list((tmp_path / "runs" / "thirds").glob("*hot"))
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("a[data-run]")).to_have_count(3)
        assert list((tmp_path / "runs" / "thirds").glob("*hot"))
        page.close()


def test_empty_folder_explains_how_to_record_a_run(
    tmp_path: Path, serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    with serve(tmp_path) as server:
        page = open_page(server.at("/"))
        expect(page.get_by_text("No runs yet")).to_be_visible()
        expect(page.get_by_text("sonde.watch")).to_be_visible()
        page.close()


def test_killed_run_is_marked_within_ten_seconds(
    live_training: tuple[Path, Any], serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    folder, process = live_training
    with serve(folder) as server:
        page = open_page(server.at("/"))
        row = page.get_by_role("row").filter(has_text="alive")
        expect(row).to_contain_text("running")
        process.kill()
        process.wait()
        expect(row).to_contain_text(re.compile("crashed|interrupted"), timeout=10_000)
        page.close()
