"""How soon the heatmap appears and how smoothly it moves:  python benchmarks/ui_paint.py

Creates runs of 200 and of 2,000 tensors (100,000 steps each by default; `--runs FOLDER` keeps them), serves each with
`sonde ui` and opens layers × steps in a headless Chromium without a GPU. Measures the time from the start of the
navigation, and from the end of the server's response, to the frame that shows the map; then, while zooming, panning and
scrolling by rows, the time between frames and the CPU time of the page per frame. The server first serves a run it has
never seen ("cold"), then one it knows ("warm").
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))

from big_run import Plan, Planted, big_run
from report import describe_machine

RESULTS = Path(__file__).parent / "results"
# The wrappers in /usr/bin force GPU rasterisation, which takes seconds per frame without a GPU.
BROWSERS = ("/usr/lib/chromium/chromium", "/usr/lib/chromium-browser/chromium-browser", "/opt/google/chrome/chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip

# One wheel event per frame, sent to the map: forward, then back again after half the period.
GESTURES: dict[str, dict[str, Any]] = {
    "zoom steps": {"axis": "deltaY", "size": -30, "period": 120},
    "pan": {"axis": "deltaX", "size": 12, "period": 80},
    "zoom rows": {"axis": "deltaY", "size": -30, "period": 120, "altKey": True},
}
MOVE = """([{axis, size, period, altKey}, count]) => new Promise((done) => {
    const map = document.querySelector('.heat .over'), box = map.getBoundingClientRect();
    const place = {clientX: box.left + box.width * 0.4, clientY: box.top + box.height * 0.4, altKey: !!altKey};
    const gaps = [];
    let last = null;
    const frame = (now) => {
        if (last !== null) gaps.push(now - last);
        last = now;
        if (gaps.length >= count) return done(gaps);
        const delta = {[axis]: gaps.length % period < period / 2 ? size : -size};
        map.dispatchEvent(new WheelEvent('wheel', {...delta, ...place, bubbles: true, cancelable: true}));
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
})"""
# The map is drawn in the frame after its mark; two frames later it is on the screen.
PAINT = """() => new Promise((done) => {
    const look = () => {
        const mark = performance.getEntriesByName('sonde-heat')[0];
        if (!mark) return requestAnimationFrame(look);
        requestAnimationFrame(() => requestAnimationFrame((now) => {
            const heat = performance.getEntriesByType('resource').find((entry) => entry.name.includes('/heat?'));
            done({shown: now, asked: heat.startTime, answered: heat.responseEnd, bytes: heat.encodedBodySize});
        }));
    };
    look();
})"""


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, str]]:
    """Run `sonde ui` in its own process; yields its URL and the fragment with the token."""
    command = [sys.executable, "-m", "sonde.cli.main", "ui", str(folder), "--no-open", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.search(r"(http://\S+)/(#token=\S+)", line)))
        yield found[1], found[2]
    finally:
        process.terminate()
        process.wait(10)


def open_map(page: Page, base: str, fragment: str) -> dict[str, float]:
    """Open the layers of the only run; returns when it appeared, in ms from the start of the navigation."""
    page.goto(f"{base}/{fragment}")
    page.locator("a[data-run]").first.wait_for()
    href = page.locator("a[data-run]").first.get_attribute("href")
    page.goto(f"{base}{href}/layers")
    found: dict[str, float] = page.evaluate(PAINT)
    return found


def smoothness(page: Page, gesture: dict[str, Any], count: int) -> dict[str, float]:
    """Time between frames, and CPU time of the page per frame, during a gesture."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def busy() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in metrics if one["name"] == "TaskDuration")

    before = busy()
    gaps = sorted(page.evaluate(MOVE, [gesture, count]))
    cpu_ms = (busy() - before) * 1000 / count
    return {
        "frames_per_s": 1000 * len(gaps) / sum(gaps),
        "median_ms": statistics.median(gaps),
        "p95_ms": gaps[int(0.95 * len(gaps))],
        "longest_ms": gaps[-1],
        "page_cpu_ms_per_frame": cpu_ms,
    }


def measure(folder: Path, rounds: int, frames: int) -> dict[str, Any]:
    """Measure one cold opening, several warm ones, then all gestures on the last page."""
    browser_path = os.environ.get("SONDE_TEST_CHROMIUM") or next(path for path in BROWSERS if os.access(path, os.X_OK))
    with served(folder) as (base, fragment), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        openings = []
        for _ in range(rounds + 1):
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            openings.append(open_map(page, base, fragment))
        page.wait_for_timeout(1000)
        moves = {name: smoothness(page, gesture, frames) for name, gesture in GESTURES.items()}
        version = browser.version
        browser.close()
    after_answer = [one["shown"] - one["answered"] for one in openings]
    warm = openings[1:]
    return {
        "chromium": version,
        "cold": {"shown_ms": openings[0]["shown"], "server_ms": openings[0]["answered"] - openings[0]["asked"]},
        "shown_ms": statistics.median(one["shown"] for one in warm),
        "server_ms": statistics.median(one["answered"] - one["asked"] for one in warm),
        "after_answer_ms": statistics.median(after_answer),
        "after_answer_worst_ms": max(after_answer),
        "tile_bytes": warm[0]["bytes"],
        "moves": moves,
    }


def make(folder: Path, num_tensors: int, num_steps: int) -> Path:
    """Create the run, unless it exists already."""
    home = folder / f"{num_tensors}x{num_steps}"
    if not list(home.glob("*/*/run.json")):
        planted = [Planted(tensor=num_tensors // 3, step=num_steps // 2, num_nan=1)]
        print(f"creating {num_tensors} tensors × {num_steps} steps", file=sys.stderr)
        big_run(home, Plan(num_tensors=num_tensors, num_steps=num_steps, planted=planted), on_progress=_progress())
    return home


def _progress() -> Callable[[int, int], None]:
    def say(done: int, total: int) -> None:
        print(f"\r{done:,} of {total:,} steps", end="" if done < total else "\n", file=sys.stderr)

    return say


def as_markdown(report: dict[str, Any]) -> str:
    machine, sizes = report["machine"]["machine"], report["sizes"]
    chromium = next(iter(sizes.values()))["chromium"]
    lines = [
        "# How soon the heatmap appears, and how smoothly it moves\n",
        f"Made by `{report['command']}` on {report['machine']['date']}, commit `{report['machine']['commit']}`:",
        f"{machine['processor']}, {machine['cores']} cores, no GPU, headless Chromium {chromium}, 1280×900;",
        f"{report['num_steps']:,} steps, {report['rounds']} warm openings, machine load {report['load']:.1f}.\n",
        "| tensors | page to map, cold | page to map, warm | of that, server | response to map (worst) | response |",
        "|---|---|---|---|---|---|",
    ]
    for size, found in sizes.items():
        cold, after, worst = found["cold"]["shown_ms"], found["after_answer_ms"], found["after_answer_worst_ms"]
        times = f"{cold:,.0f} ms | {found['shown_ms']:,.0f} ms | {found['server_ms']:,.0f} ms | {after:,.0f} ms"
        lines.append(f"| {int(size):,} | {times} ({worst:,.0f}) | {found['tile_bytes'] / 1e6:.2f} MB |")
    lines += [
        "\n| tensors | move | frames/s | median | 95 % | longest | CPU of the page per frame |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, found in sizes.items():
        for name, move in found["moves"].items():
            times = (f"{move[key]:.1f} ms" for key in ("median_ms", "p95_ms", "longest_ms", "page_cpu_ms_per_frame"))
            lines.append(f"| {int(size):,} | {name} | {move['frames_per_s']:.0f} | {' | '.join(times)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[200, 2000])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5, help="warm openings of the page")
    parser.add_argument("--frames", type=int, default=240, help="frames of each move")
    parser.add_argument("--runs", type=Path, help="folder for the runs, kept and reused")
    parser.add_argument("--out", type=Path, default=RESULTS / "ui-paint.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        homes = {size: make(folder, size, options.steps) for size in options.tensors}
        report: dict[str, Any] = {
            "command": "python benchmarks/ui_paint.py",
            "machine": describe_machine(threads=1),
            "load": os.getloadavg()[0],
            "num_steps": options.steps,
            "rounds": options.rounds,
            "sizes": {str(size): measure(home, options.rounds, options.frames) for size, home in homes.items()},
        }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(as_markdown(report))
    print(as_markdown(report))


if __name__ == "__main__":
    main()
