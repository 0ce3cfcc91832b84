"""One tensor: related tensors, value distribution over time, exact values and snapshots."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sonde

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


def to_tensor(page: Any, kind: str, name: str, query: str = "") -> None:
    """Open a tensor by name."""
    run = page.url.split("/run/")[1].split("/")[0]
    sites = page.evaluate("(id) => fetch(`/api/runs/${id}/sites`).then((answer) => answer.json())", run)
    columns = sites["columns"]
    place = next(
        n for n, found in enumerate(columns["name"]) if found == name and sites["kinds"][columns["kind"][n]] == kind
    )
    page.goto(f"{page.url.split('/run/')[0]}/run/{run}/tensor/{columns['i'][place]}{query}")
    expect(page.get_by_role("heading", level=1)).to_have_text(f"{kind}/{name}")


@pytest.fixture
def fine(open_run: Callable[..., Any]) -> Any:
    return open_run("fine")


def test_weight_gradient_and_update_are_shown_together(fine: Any, picture: Callable[..., None]) -> None:
    to_tensor(fine, "grad", "blocks.1.linear1.weight")
    for title in ("Gradient", "Weight", "Update", "Activation blocks.1.linear1", "Update ratio", "Quantiles of |x|"):
        expect(fine.locator("figure .title").get_by_text(title, exact=True)).to_be_visible()
    expect(fine.locator(".uplot")).to_have_count(6)
    expect(fine.get_by_text("64 × 32 float32 · in Linear")).to_be_visible()
    picture(fine, "tensor")


def test_exact_values_match_the_run(fine: Any, demo_runs: Path) -> None:
    to_tensor(fine, "grad", "head.bias", "?step=17")
    rows = sonde.open("thirds/fine", dir=demo_runs).stats("grad/head.bias/norm").to_pylist()
    value = next(row["value"] for row in rows if row["step"] == 17)
    table = fine.get_by_role("table").filter(has_text="zero_fraction")
    row = table.get_by_role("row").filter(has=fine.get_by_role("rowheader", name="norm", exact=True))
    expect(row).to_be_visible()
    column = table.get_by_role("columnheader").all_inner_texts().index("grad")
    expect(row.get_by_role("cell").nth(column - 1)).to_have_text(str(float(f"{value:.9g}")))


def test_j_and_k_move_between_tensors(fine: Any) -> None:
    to_tensor(fine, "grad", "blocks.0.linear1.weight", "?stat=norm")
    heading = fine.get_by_role("heading", level=1)
    fine.keyboard.press("j")
    expect(heading).to_have_text("grad/blocks.0.linear1.bias")
    expect(fine).to_have_url(re.compile("stat=norm"))
    fine.keyboard.press("k")
    expect(heading).to_have_text("grad/blocks.0.linear1.weight")


def test_magnitudes_as_heatmap_ridges_and_table(fine: Any) -> None:
    to_tensor(fine, "grad", "head.weight")
    figure = fine.locator("figure").filter(has_text="Magnitudes (powers of two)")
    expect(figure.get_by_role("img")).to_be_visible()
    figure.get_by_role("button", name="Ridges").click()
    expect(fine).to_have_url(re.compile("hist=ridge"))
    expect(figure.get_by_role("img")).to_be_visible()
    figure.get_by_role("button", name="Table").click()
    expect(figure.get_by_role("row").nth(1)).to_contain_text(re.compile("2[⁻⁰-⁹]"))


def test_zoom_is_shared_by_all_charts_and_kept_in_the_url(fine: Any) -> None:
    to_tensor(fine, "param", "head.weight")
    expect(fine.locator(".uplot").first).to_be_visible()
    fine.keyboard.press("+")
    expect(fine).to_have_url(re.compile(r"from=30&to=89"))
    fine.keyboard.press("]")
    expect(fine).to_have_url(re.compile(r"from=45&to=104"))
    fine.get_by_role("button", name="Show all steps").click()
    expect(fine).not_to_have_url(re.compile("from="))


def test_nan_of_a_spoilt_run_is_shown(open_run: Callable[..., Any]) -> None:
    page = open_run("spoilt")
    to_tensor(page, "param", "embed.weight", "?step=110")
    expect(page.locator(".broken").first).to_be_visible()
    expect(page.get_by_role("rowheader", name="rms", exact=True).locator("xpath=../td").first).to_have_text("NaN")


def test_unknown_tensor_has_an_empty_state(fine: Any) -> None:
    fine.goto(f"{fine.url}/tensor/99999")
    expect(fine.get_by_text("This run has no tensor 99999")).to_be_visible()


@pytest.fixture(scope="module")
def with_snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two snapshots of its weights, one of which contains a NaN."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("zarr")
    folder = tmp_path_factory.mktemp("kept")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.init(project="kept", name="whole", dir=folder)
    session.watch(model, optimizer, snapshots=sonde.every(5))
    for step in range(10):
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            with torch.no_grad():
                model[0].weight[3, 7] = float("nan")
    session.finish()
    return folder


def test_snapshot_is_shown_as_image_and_spectrum(
    with_snapshots: Path, serve: Callable[..., Any], open_page: Callable[..., Any], picture: Callable[..., None]
) -> None:
    with serve(with_snapshots) as server:
        page = open_page(server.at("/"))
        page.get_by_role("link", name="whole", exact=True).click()
        expect(page).to_have_url(re.compile("/run/"))
        to_tensor(page, "param", "0.weight", "?step=0")
        image = page.get_by_role("img", name=re.compile(r"0\.weight at step 0: 16 by 24"))
        expect(image).to_be_visible()
        expect(page.get_by_text("Singular values")).to_be_visible()
        page.get_by_role("slider").focus()
        page.keyboard.press("End")
        expect(page.get_by_role("img", name=re.compile("at step 5: .*1 NaN"))).to_be_visible()
        picture(page, "tensor-snapshot")
        page.close()
