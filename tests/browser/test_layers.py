"""The layers heatmap: mouse, keyboard and screen reader."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sonde

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser

NAN = (212, 16, 24)


def wait_for_map(page: Any) -> Any:
    expect(page.locator('.heat[data-ready="true"]').first).to_be_visible()
    return page.get_by_role("application").first


def pixel(page: Any, x: float, y: float) -> tuple[int, int, int]:
    """Colour of the heatmap at a fraction of its width and height."""
    found = page.evaluate(
        """([x, y]) => {
            const canvas = document.querySelector('.heat .box > canvas'), pad = document.querySelector('.heat .over');
            const scale = canvas.width / canvas.clientWidth;
            const at = [x * pad.clientWidth * scale, y * pad.clientHeight * scale].map(Math.floor);
            const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
            copy.drawImage(canvas, at[0], at[1], 1, 1, 0, 0, 1, 1);
            return [...copy.getImageData(0, 0, 1, 1).data];
        }""",
        [x, y],
    )
    return found[0], found[1], found[2]


def point(page: Any, x: float, y: float) -> tuple[float, float]:
    box = page.get_by_role("application").bounding_box()
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


@pytest.fixture
def spoilt(open_run: Callable[..., Any]) -> Any:
    page = open_run("spoilt", "/layers")
    wait_for_map(page)
    return page


def test_hover_shows_the_exact_recorded_value(spoilt: Any, demo_runs: Path, picture: Callable[..., None]) -> None:
    spoilt.mouse.move(*point(spoilt, 0.301, 0.01))
    readout = spoilt.locator(".readout")
    expect(readout).to_contain_text("embed.weight · step 36")
    run = sonde.open("thirds/spoilt", dir=demo_runs)
    rows = run.stats("grad/embed.weight/rms").to_pylist()
    value = next(row["value"] for row in rows if row["step"] == 36)
    expect(readout).to_contain_text(f"rms = {float(f'{value:.9g}')!r}"[:14])
    picture(spoilt, "layers")


def test_only_spoilt_steps_have_the_nan_colour(spoilt: Any) -> None:
    assert pixel(spoilt, 0.8, 0.5) == NAN
    assert pixel(spoilt, 0.3, 0.5) != NAN


def test_keys_move_the_cursor_and_open_the_tensor(spoilt: Any) -> None:
    spoilt.get_by_role("application").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown"):
        spoilt.keyboard.press(key)
    expect(spoilt.locator("p[aria-live]")).to_contain_text(re.compile(r"embed\.bias, step 2, \d"))
    spoilt.keyboard.press("Enter")
    expect(spoilt).to_have_url(re.compile(r"/tensor/\d+\?step=2&stat=rms"))
    expect(spoilt.get_by_role("heading", level=1)).to_have_text("grad/embed.bias")


def test_zoom_pan_and_reset_are_kept_in_the_url(spoilt: Any) -> None:
    for _ in range(8):
        spoilt.keyboard.press("+")
    expect(spoilt).to_have_url(re.compile(r"from=58&to=61"))
    spoilt.keyboard.press("]")
    spoilt.keyboard.press("]")
    expect(spoilt).to_have_url(re.compile(r"from=60&to=63"))
    spoilt.reload()
    wait_for_map(spoilt)
    spoilt.mouse.move(*point(spoilt, 0.1, 0.5))
    expect(spoilt.locator(".readout")).to_contain_text("step 60")
    spoilt.keyboard.press("0")
    expect(spoilt).not_to_have_url(re.compile("from="))


def test_wheel_zooms_around_the_pointer_and_drag_pans(spoilt: Any) -> None:
    spoilt.mouse.move(*point(spoilt, 0.5, 0.5))
    spoilt.mouse.wheel(0, -500)
    expect(spoilt).to_have_url(re.compile(r"from=\d+&to=\d+"))
    before = re.search(r"from=(\d+)", spoilt.url)
    spoilt.mouse.down()
    spoilt.mouse.move(*point(spoilt, 0.7, 0.5), steps=4)
    spoilt.mouse.up()
    spoilt.wait_for_timeout(500)
    after = re.search(r"from=(\d+)", spoilt.url)
    assert before is not None
    assert after is not None
    assert int(after[1]) < int(before[1])


def test_updating_the_url_does_not_move_the_heatmap(spoilt: Any) -> None:
    spoilt.mouse.move(*point(spoilt, 0.37, 0.41))
    for _ in range(5):
        spoilt.mouse.wheel(0, -137)
    spoilt.keyboard.press("}")
    spoilt.mouse.move(*point(spoilt, 0.37, 1.2))
    look = "document.querySelector('.heat .box > canvas').toDataURL()"
    spoilt.wait_for_timeout(100)
    before = spoilt.evaluate(look)
    expect(spoilt).to_have_url(re.compile(r"from=\d+&to=\d+&rows="))
    spoilt.wait_for_timeout(300)
    assert spoilt.evaluate(look) == before


def test_folded_block_is_one_row_and_keeps_its_nan(spoilt: Any) -> None:
    spoilt.get_by_label("fold").select_option(label="Depth 2")
    folded = spoilt.get_by_role("treeitem", name=re.compile(r"blocks\.0, 12 tensors folded"))
    expect(folded).to_be_visible()
    assert pixel(spoilt, 0.8, 0.5) == NAN
    spoilt.reload()
    wait_for_map(spoilt)
    folded.focus()
    spoilt.keyboard.press("ArrowRight")
    expect(spoilt.get_by_role("treeitem", name="blocks.0.norm1.weight", exact=True)).to_be_visible()
    expect(spoilt.get_by_role("treeitem", name=re.compile("blocks.1, 12 tensors folded"))).to_be_visible()


def test_filter_keeps_matching_rows_and_has_an_empty_state(spoilt: Any) -> None:
    spoilt.keyboard.press("/")
    spoilt.keyboard.type("norm* bias")
    expect(spoilt.get_by_text("6 of 40 rows")).to_be_visible()
    expect(spoilt.get_by_role("treeitem")).to_have_count(6)
    spoilt.get_by_label("Filter rows").fill("<b>nothing")
    expect(spoilt.get_by_text("No rows match “<b>nothing”")).to_be_visible()


def test_shift_drag_selects_and_the_selection_has_actions(spoilt: Any) -> None:
    spoilt.keyboard.down("Shift")
    spoilt.mouse.move(*point(spoilt, 0.25, 0.2))
    spoilt.mouse.down()
    spoilt.mouse.move(*point(spoilt, 0.5, 0.4), steps=4)
    spoilt.mouse.up()
    spoilt.keyboard.up("Shift")
    panel = spoilt.get_by_role("group", name="Selection")
    expect(panel).to_contain_text("steps 30–60")
    expect(panel.get_by_role("link", name="Compare runs")).to_have_attribute("href", re.compile(r"from=30&to=60"))
    panel.get_by_role("button", name="Zoom to selection").click()
    expect(spoilt).to_have_url(re.compile(r"from=30&to=60&rows=8-"))


def test_visible_values_as_a_table_include_nan(spoilt: Any) -> None:
    spoilt.get_by_role("button", name="Table").click()
    table = spoilt.get_by_role("table")
    row = table.get_by_role("row").filter(has_text="head.weight")
    expect(row.get_by_role("cell").last).to_have_text("NaN or ∞")
    expect(row.get_by_role("cell").first).to_have_text(re.compile(r"^0?\.?\d"))


def test_finding_is_marked_and_its_mark_links_to_it(spoilt: Any) -> None:
    page = spoilt
    expect(page.get_by_role("link", name=re.compile("Findings"))).to_contain_text(re.compile(r"\d"))
    run_id = page.url.split("/run/")[1].split("/")[0]
    found = page.evaluate("(id) => fetch(`/api/runs/${id}/findings`).then((answer) => answer.json())", run_id)
    step = min(one["step"] for one in found["findings"])
    # The tip of the mark is at its step; hover over each row to find it.
    box = page.get_by_role("application").bounding_box()
    x = box["x"] + box["width"] * step / 120 - 4
    for row in range(40):
        page.mouse.move(x, box["y"] + (row + 0.5) * box["height"] / 40)
        if page.locator(".finding").count():
            break
    expect(page.locator(".finding")).to_contain_text(found["findings"][0]["rule"])
    page.mouse.down()
    page.mouse.up()
    expect(page).to_have_url(re.compile("/findings"))


def test_every_kind_can_be_shown_and_health_links_to_gradients(open_run: Callable[..., Any]) -> None:
    page = open_run("spoilt", "/layers")
    wait_for_map(page)
    for kind in page.get_by_label("kind").locator("option").all_inner_texts():
        page.get_by_label("kind").select_option(kind)
        wait_for_map(page)
        expect(page.get_by_role("application")).to_have_attribute("aria-label", re.compile(f"^{kind} "))
    expect(page.get_by_label("stat")).to_have_value("score")
    page.mouse.click(*point(page, 0.5, 0.99))
    expect(page).to_have_url(re.compile("kind=grad.*q=head|q=head.*kind=grad"))


def test_live_run_grows_without_moving_the_view(
    live_training: Any, serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    folder, _ = live_training
    with serve(folder) as server:
        page = open_page(server.at("/"))
        page.get_by_role("link", name="alive", exact=True).click()
        page.keyboard.press("g")
        page.keyboard.press("l")
        wait_for_map(page)
        foot = page.locator(".foot")
        expect(foot).to_contain_text(re.compile(r"steps 0–([2-9]\d|\d{3,})"), timeout=30_000)
        page.keyboard.press("+")
        page.keyboard.press("[")
        expect(page).to_have_url(re.compile("from="))
        before, text = page.url, foot.inner_text()
        deadline = time.monotonic() + 20
        while foot.inner_text() == text and time.monotonic() < deadline:
            page.wait_for_timeout(250)
        assert foot.inner_text() != text, "the run did not grow"
        page.wait_for_timeout(1500)
        assert page.url == before
        page.close()  # before the server stops, which would log errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_and_wide_without_sideways_scroll(open_run: Callable[..., Any], scheme: str) -> None:
    for width in (360, 1600):
        page = open_run("spoilt", "/layers", width=width, height=740, color_scheme=scheme)
        wait_for_map(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        assert pixel(page, 0.8, 0.5) == NAN
