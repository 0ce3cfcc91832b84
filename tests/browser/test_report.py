"""The report in a real browser: opened from disk and offline, completely drawn, without console errors."""

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


def external_requests(page: Any) -> list[str]:
    """All URLs a page requests from outside its own file."""
    outside: list[str] = []
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else outside.append(r.url))
    return outside


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_all_sections_are_drawn_offline(
    report: Path, open_page: Callable[..., Any], picture: Callable[..., None], axe: Any, width: int, scheme: str
) -> None:
    page = open_page(width=width, color_scheme=scheme, offline=True)
    outside = external_requests(page)
    page.goto(report.as_uri())
    for title in SECTIONS:
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    expect(page.locator("[data-analysis] .verdict")).to_have_count(4)
    expect(page.locator("article[data-finding]").first).to_contain_text("nan inf")
    expect(page.locator("[data-analysis=gradient_flow] .verdict")).to_have_class(re.compile("bad"))
    assert page.locator("canvas").count() >= 8
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert outside == []
    # axe runs through the debugger, which the content security policy does not restrict.
    assert axe(page) == []
    if (width, scheme) == (1280, "light"):
        picture(page, "report-1280-light")


def test_other_views_work_without_a_server(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report.as_uri(), offline=True)
    for view in ("Overview", "Findings", "Layers", "Flow"):
        page.get_by_role("navigation", name="Views").get_by_role("link", name=re.compile(f"^{view}")).click()
        expect(page.locator("main")).not_to_contain_text("Not included in this report")
        expect(page.locator("main canvas, main svg").first).to_be_visible()
    page.reload()
    expect(page.locator("main svg, main canvas").first).to_be_visible()


def test_charts_below_the_fold_are_drawn(report: Path, open_page: Callable[..., Any]) -> None:
    """Otherwise they would be blank when the report is printed from the browser."""
    page = open_page(report.as_uri(), width=800, height=300, offline=True)
    expect(page.locator("[data-lazy]").nth(2)).to_be_attached()
    expect(page.locator("[data-lazy]:not(:has(canvas))")).to_have_count(0)


def test_tensors_of_findings_are_in_the_report(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report.as_uri(), offline=True)
    page.locator("article[data-finding] a[href*='/tensor/']").first.click()
    expect(page.locator("main canvas").first).to_be_visible()
    expect(page.locator("main")).not_to_contain_text("Not included in this report")


def test_hostile_names_cannot_run_scripts(
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
    assert path.stat().st_size < 7_500_000  # including about 0.4 MB for the front-end
    page = open_page(path.as_uri(), offline=True)
    for title in SECTIONS:
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()


def test_print_puts_nothing_that_may_not_be_split_into_a_grid(report: Path, open_page: Callable[..., Any]) -> None:
    """Chromium prints the cells of a grid over one another if they may not be split over pages."""
    page = open_page(report.as_uri(), offline=True)
    expect(page.locator("[data-analysis] .verdict")).to_have_count(4)
    page.emulate_media(media="print")
    found = page.evaluate(
        """() => [...document.querySelectorAll("main *")]
            .filter(one => getComputedStyle(one).breakInside === "avoid")
            .map(one => [one.tagName, getComputedStyle(one.parentElement).display])"""
    )
    assert {"FIGURE", "ARTICLE", "SECTION"} <= {tag for tag, _ in found}
    assert [one for one in found if "grid" in one[1]] == []


def test_pdf_contains_everything(demo_runs: Path, front_end: Path, chromium: str, tmp_path: Path) -> None:
    path = write(run_of(demo_runs, "small-gpt"), tmp_path / "report.pdf")
    printed = path.read_bytes()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", printed)) >= 5
    if shutil.which("pdftotext"):
        text = subprocess.run(["pdftotext", str(path), "-"], check=True, capture_output=True, text=True).stdout
        assert all(title in text for title in SECTIONS)
    write(run_of(demo_runs, "small-gpt"), path)  # an existing sonde report may be overwritten


def test_notebook_card_is_drawn(demo_runs: Path, open_page: Callable[..., Any], picture: Any) -> None:
    import sonde

    page = open_page(width=900, height=620)
    page.set_content(f"<body>{sonde.open(run_of(demo_runs, 'small-gpt'))._repr_html_()}</body>")
    expect(page.locator(".sonde-top svg polyline")).to_be_visible()
    expect(page.locator(".sonde-finding svg polyline").first).to_be_visible()
    expect(page.locator(".sonde-finding").first).to_contain_text("nan_inf")
    expect(page.get_by_text("Largest gradients")).to_be_visible()
    table = page.locator(".sonde-card details", has_text="Largest gradients").locator("table")
    expect(table).to_be_hidden()
    page.get_by_text("Largest gradients").click()
    expect(table).to_be_visible()
    picture(page, "card")


def test_results_fit_a_dark_page_and_the_style_of_jupyter(demo_runs: Path, open_page: Callable[..., Any]) -> None:
    import sonde

    run = sonde.open(run_of(demo_runs, "small-gpt"))
    results = run.findings(), run.findings()[0], run.scalars("loss"), sonde.runs(demo_runs), sonde.compare(run, run)
    page = open_page(width=900, height=620)
    page.set_content(
        "<style>body{background:#111;color:#dddddd} .jp-RenderedHTMLCommon:not(.x) td{text-align:right;color:black}"
        f"</style><body class='jp-RenderedHTMLCommon'>{''.join(one._repr_html_() for one in results)}</body>"
    )
    expect(page.locator(".sonde-card")).to_have_count(len(results))
    for cell in (page.get_by_role("cell", name="finished").first, page.get_by_role("cell", name="loss").first):
        expect(cell).to_have_css("text-align", "left")
        expect(cell).to_have_css("color", "rgb(221, 221, 221)")
    expect(page.locator("td.sonde-n").first).to_have_css("text-align", "right")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_picture_of_the_monitor(
    demo_runs: Path, open_page: Callable[..., Any], picture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("textual_plotext", reason="the monitor needs textual-plotext: pip install 'sonde-ml[monitor]'")
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
    drawn = re.sub(r"@font-face \{.*?\}", "", found.stdout, flags=re.DOTALL)  # remote fonts cannot be loaded
    assert "nan_inf" in drawn
    page = open_page(width=1600, height=985)
    page.set_content(f"<body style='margin:0'>{drawn}</body>")
    expect(page.locator("svg")).to_be_visible()
    picture(page, "monitor")
