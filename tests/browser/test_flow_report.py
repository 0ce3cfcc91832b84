"""The flow report of one batch: layout on a phone and in dark mode, and a table to sort and filter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a model with vanishing gradients."""
    import torch
    from torch import nn

    from sonde.flow import analyze

    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(16, 16), nn.Sigmoid())), nn.Linear(16, 4))
    found = analyze(model, torch.randn(32, 16), torch.randint(4, (32,)), nn.CrossEntropyLoss())
    return found.save_html(tmp_path_factory.mktemp("flow") / "flow.html")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_whole_depth_is_visible_without_overflow(
    report: Path, open_page: Callable[..., Any], axe: Any, width: int, scheme: str
) -> None:
    page = open_page(report.as_uri(), width=width, color_scheme=scheme, offline=True)
    bars = [bar.bounding_box() for bar in page.locator("svg rect").all()]
    assert len(bars) == 17
    assert all(bar["x"] >= 0 and bar["x"] + bar["width"] <= width for bar in bars)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert axe(page) == []


def test_layers_can_be_filtered_by_issue_and_sorted(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report.as_uri())
    rows = page.locator("tbody tr:visible")
    expect(rows).to_have_count(18)
    page.get_by_label("filter layers").fill("vanishing")
    assert set(rows.locator("td:nth-child(2)").all_text_contents()) == {"Linear"}
    page.get_by_label("filter layers").fill("")
    for is_rising in (False, True):
        page.get_by_role("button", name="score").click()
        scores = [float(text) for text in rows.locator("td:nth-child(3)").all_text_contents()]
        assert scores == sorted(scores, reverse=not is_rising)
