"""The report in a real browser: opened from disk, without a network, all of it drawn and nothing complained about."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.browser
SECTIONS = ("Training convergence", "Gradient flow", "Weight distribution evolution", "Overfitting")


def write(run: Path | str, path: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "sonde.cli.main", "report", str(run), "-o", str(path), *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return path


def run_of(folder: Path, name: str) -> Path:
    return next(path.parent for path in folder.glob("*/*/run.json") if name in path.parent.name)


@pytest.fixture(scope="module")
def report(demo_runs: Path, front_end: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(run_of(demo_runs, "small-gpt"), tmp_path_factory.mktemp("report") / "report.html")


def asked_outside(page: Any) -> list[str]:
    """Every address a page asks for that is not in its own file."""
    outside: list[str] = []
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else outside.append(r.url))
    return outside


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_all_sections_are_drawn_from_the_file_alone(
    report: Path, open_page: Callable[..., Any], picture: Callable[..., None], axe: Any, width: int, scheme: str
) -> None:
    page = open_page(width=width, color_scheme=scheme, offline=True)
    outside = asked_outside(page)
    page.goto(report.as_uri())
    for title in SECTIONS:
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    expect(page.locator("[data-analysis] .verdict")).to_have_count(4)
    expect(page.locator("article[data-finding]").first).to_contain_text("nan inf")
    expect(page.locator("[data-analysis=gradient_flow]")).to_contain_text("stopped being finite")
    assert page.locator("canvas").count() >= 8
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert outside == []
    # What axe needs is evaluated by the debugger, which our policy does not bind.
    assert axe(page) == []
    if (width, scheme) == (1280, "light"):
        picture(page, "report-1280-light")


def test_other_views_work_without_a_server(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report.as_uri(), offline=True)
    for view in ("Overview", "Findings", "Layers", "Flow"):
        page.get_by_role("navigation", name="Views").get_by_role("link", name=re.compile(f"^{view}")).click()
        expect(page.locator("main")).not_to_contain_text("not part of the report")
        expect(page.locator("main canvas, main svg").first).to_be_visible()
    page.reload()
    expect(page.locator("main svg, main canvas").first).to_be_visible()


def test_what_lies_below_the_screen_is_drawn_too(report: Path, open_page: Callable[..., Any]) -> None:
    """Printed from the browser, a chart that was never scrolled to would be blank."""
    page = open_page(report.as_uri(), width=800, height=300, offline=True)
    expect(page.locator("[data-lazy]").nth(2)).to_be_attached()
    expect(page.locator("[data-lazy]:not(:has(canvas))")).to_have_count(0)


def test_tensor_that_a_finding_names_is_in_the_report(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report.as_uri(), offline=True)
    page.locator("article[data-finding] a[href*='/tensor/']").first.click()
    expect(page.locator("main canvas").first).to_be_visible()
    expect(page.locator("main")).not_to_contain_text("not part of the report")


def test_hostile_names_run_nothing(
    front_end: Path, tmp_path: Path, open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hostile_run import hostile_run

    hostile_run(tmp_path / "runs")
    run = next((tmp_path / "runs").glob("**/run.json")).parent
    page = open_page(write(run, tmp_path / "report.html").as_uri(), offline=True)
    for title in SECTIONS:
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    assert page.evaluate("() => window.hacked === undefined")
    assert page.locator("main script, main iframe, main img").count() == 0


@pytest.mark.slow
def test_two_thousand_tensors_stay_below_seven_megabytes(
    front_end: Path, tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    from big_run import Plan, big_run

    run = big_run(tmp_path / "runs", Plan(num_tensors=2000, num_steps=600, num_extra_scalars=20))
    path = write(run, tmp_path / "report.html")
    assert path.stat().st_size < 7_500_000  # of which the program is some 0.4 MB
    page = open_page(path.as_uri(), offline=True)
    for title in SECTIONS:
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()


def test_pdf_is_printed_with_everything_on_it(demo_runs: Path, front_end: Path, chromium: str, tmp_path: Path) -> None:
    path = write(run_of(demo_runs, "small-gpt"), tmp_path / "report.pdf")
    printed = path.read_bytes()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", printed)) >= 5
    if shutil.which("pdftotext"):
        text = subprocess.run(["pdftotext", str(path), "-"], check=True, capture_output=True, text=True).stdout
        assert all(title in text for title in SECTIONS)
    write(run_of(demo_runs, "small-gpt"), path)  # a report of ours is known again, and replaced


def test_card_of_a_notebook_is_drawn(demo_runs: Path, open_page: Callable[..., Any], picture: Any) -> None:
    import sonde

    page = open_page(width=900, height=620)
    page.set_content(f"<body>{sonde.open(run_of(demo_runs, 'small-gpt'))._repr_html_()}</body>")
    expect(page.locator(".sonde-card svg polyline")).to_be_visible()
    expect(page.locator(".sonde-finding").first).to_contain_text("nan_inf")
    expect(page.get_by_text("Largest gradients")).to_be_visible()
    table = page.locator(".sonde-card details", has_text="Largest gradients").locator("table")
    expect(table).to_be_hidden()
    page.get_by_text("Largest gradients").click()
    expect(table).to_be_visible()
    picture(page, "card")


def test_picture_of_the_monitor(
    demo_runs: Path, open_page: Callable[..., Any], picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("textual_plotext", reason="the monitor needs textual-plotext: pip install 'sonde[monitor]'")
    program = f"""
import asyncio, sys
from pathlib import Path
from sonde.show.monitor.app import Monitor
from sonde.show.monitor.target import Target
from sonde.show.monitor.watching import WatchedRuns

async def main():
    watching = WatchedRuns(Target(Path({str(demo_runs)!r})))
    watching.choose({str(run_of(demo_runs, "small-gpt"))!r})
    app = Monitor(watching)
    async with app.run_test(size=(130, 38)) as pilot:
        while app.latest is None or not app.latest.is_judged:
            await pilot.pause(0.1)
        await pilot.pause(0.5)
        sys.stdout.write(app.export_screenshot())

asyncio.run(main())
"""
    monkeypatch.setenv("TEXTUAL_COLOR_SYSTEM", "truecolor")
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    drawn = re.sub(r"@font-face \{.*?\}", "", found.stdout, flags=re.DOTALL)  # fonts of a network that is not there
    assert "nan_inf" in drawn
    page = open_page(width=1600, height=985)
    page.set_content(f"<body style='margin:0'>{drawn}</body>")
    expect(page.locator("svg")).to_be_visible()
    picture(page, "monitor")
