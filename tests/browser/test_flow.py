"""Flow: gradients along depth at a step, the pipe diagram, attention and recurrence over time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sonde

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


@pytest.fixture
def fine(open_run: Callable[..., Any]) -> Any:
    page = open_run("fine", "/flow")
    expect(page.get_by_role("table", name=re.compile("Pressure by layer"))).to_be_visible()
    return page


def pipe_row(page: Any, layer: str) -> Any:
    table = page.get_by_role("table", name=re.compile("by layer"))
    return table.get_by_role("row").filter(has=page.get_by_role("rowheader", name=layer, exact=True))


def test_layers_are_in_model_order(fine: Any, picture: Callable[..., None]) -> None:
    layers = fine.get_by_role("table", name=re.compile("by layer")).get_by_role("rowheader").all_inner_texts()
    assert layers[0] == "embed"
    assert layers[-1] == "head"
    blocks = [int(name.split(".")[1]) for name in layers if name.startswith("blocks")]
    assert blocks == sorted(blocks)
    expect(fine.locator(".frame svg path")).to_have_count(len(layers))
    picture(fine, "flow")


def test_pressure_is_the_mean_magnitude_of_the_gradient(fine: Any, demo_runs: Path) -> None:
    fine.goto(f"{fine.url}?step=40")
    run = sonde.open("thirds/fine", dir=demo_runs)
    table = run.stats(["grad/head.*/abs_mean", "grad/head.*/n"]).to_pylist()
    at = {(row["site"], row["stat"]): row["value"] for row in table if row["step"] == 40}
    sites = ("head.weight", "head.bias")
    total = sum(at[site, "abs_mean"] * at[site, "n"] for site in sites) / sum(at[site, "n"] for site in sites)
    expect(pipe_row(fine, "head").get_by_role("cell").nth(1)).to_have_text(f"{total:.3g}")


def test_slider_and_keys_select_the_step_and_pinned_lines_stay(fine: Any) -> None:
    fine.get_by_role("button", name="Pin step").click()
    fine.keyboard.press("k")
    expect(fine).to_have_url(re.compile("step=118"))
    slider = fine.get_by_role("slider", name="Step")
    slider.focus()
    fine.keyboard.press("Home")
    expect(fine).to_have_url(re.compile("step=0"))
    expect(slider).to_have_attribute("aria-valuetext", "step 0")
    expect(fine.locator(".legend").get_by_text("step 119")).to_be_visible()


def test_playback_advances_the_step_and_can_be_paused(fine: Any) -> None:
    fine.keyboard.press("p")
    expect(fine.get_by_role("button", name="Pause")).to_be_visible()
    expect(fine).to_have_url(re.compile(r"step=[1-9]"))
    fine.keyboard.press("p")
    expect(fine.get_by_role("button", name="Play")).to_be_visible()
    stopped = fine.url
    fine.wait_for_timeout(500)
    assert fine.url == stopped


def test_non_finite_gradients_are_shown(open_run: Callable[..., Any]) -> None:
    page = open_run("spoilt", "/flow?step=90")
    expect(pipe_row(page, "head").get_by_role("cell").nth(1)).to_have_text("NaN or ∞")
    expect(page.get_by_role("slider", name="Step")).to_have_attribute("aria-valuetext", "step 90")


def test_attention_heatmap_is_read_by_keyboard(fine: Any) -> None:
    heat = fine.get_by_role("application", name=re.compile("^Entropy, mean"))
    heat.scroll_into_view_if_needed()
    heat.focus()
    fine.keyboard.press("ArrowRight")
    expect(
        fine.get_by_text(re.compile(r"blocks\.0\.self_attn · step 0: ≈ 0\.\d|blocks\.0\.self_attn · step 0: ≈ 1"))
    ).to_be_visible()
    expect(fine.get_by_text("No recurrent layers were recorded in this run.")).to_be_visible()


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("recurrent")
    torch.manual_seed(0)
    model = torch.nn.LSTM(4, 8, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.init(project="rnn", name="loops", dir=folder)
    session.watch(model, optimizer)
    for _ in range(12):
        model(torch.randn(4, 16, 4))[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        # The names that a ModuleMonitor uses for attention heads.
        session.log({f"attention_entropy/attn.head_{head}": 0.5 + head / 10 for head in range(3)})
    session.finish()
    return folder


def test_recurrence_shows_its_reach_and_attention_has_an_empty_state(
    recurrent: Path, serve: Callable[..., Any], open_page: Callable[..., Any]
) -> None:
    with serve(recurrent) as server:
        page = open_page(server.at("/"))
        page.get_by_role("link", name="loops", exact=True).click()
        expect(page).to_have_url(re.compile("/run/"))
        page.goto(f"{page.url}/flow")
        expect(page.locator("figure").filter(has_text="Reach through time").locator(".uplot")).to_be_visible()
        expect(page.get_by_text("No attention was recorded in this run.")).to_be_visible()
        heads = page.get_by_role("application", name=re.compile("^Entropy per head"))
        heads.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        expect(page.get_by_text("attn.head 1 · step 0: ≈ 0.6")).to_be_visible()
        page.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_no_sideways_scroll(open_run: Callable[..., Any], width: int) -> None:
    page = open_run("fine", "/flow", width=width)
    expect(page.get_by_role("table", name=re.compile("by layer"))).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
