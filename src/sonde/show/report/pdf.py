"""A report as PDF, printed by a Chromium of this machine. None is brought along."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from sonde.errors import SondeError, UsageError

BROWSER_VARIABLE: Final = "SONDE_CHROMIUM"
# The binaries first: wrappers of distributions may force settings under which a headless page takes minutes.
_PLACES: Final = (
    "/usr/lib/chromium/chromium",
    "/usr/lib/chromium-browser/chromium-browser",
    "/usr/lib64/chromium-browser/chromium-browser",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
_NAMES: Final = ("google-chrome-stable", "google-chrome", "chromium", "chromium-browser", "microsoft-edge", "chrome")
_FLAGS: Final = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--no-pdf-header-footer",
    "--run-all-compositor-stages-before-draw",
    "--window-size=720,1000",  # as wide as the paper's text: charts are drawn once, for this width
)
DRAWING_MS: Final = 20_000
"""Of the page's own clock, which runs ahead while nothing happens."""
TIMEOUT_S: Final = 240.0
MARK: Final = b"\n% sonde report\n"
"""A comment behind the end, by which we know our own file again."""


class BrowserError(SondeError):
    """No browser to print with, or one that failed."""


def find_browser() -> Path | None:
    """SONDE_CHROMIUM, else a Chromium where it is usually found."""
    asked = os.environ.get(BROWSER_VARIABLE)
    if asked:
        if not Path(asked).is_file():
            raise UsageError(f"{BROWSER_VARIABLE} names {asked}, and there is no such file.")
        return Path(asked)
    known = [Path(place) for place in _PLACES if os.access(place, os.X_OK)]
    return next(iter(known), None) or next((Path(found) for name in _NAMES if (found := shutil.which(name))), None)


def require_browser() -> Path:
    """The browser, or what to do without one."""
    found = find_browser()
    if found is None:
        raise BrowserError(
            "a PDF is printed by Chromium or Chrome, and none was found. Install one, or name it with "
            f"{BROWSER_VARIABLE}=/path/to/chrome; or write --format html and print it from any browser."
        )
    return found


def print_pdf(page: str, path: Path) -> None:
    """Print a page that needs nothing else into a file."""
    browser = require_browser()
    with tempfile.TemporaryDirectory(prefix="sonde-report-") as folder:
        source = Path(folder) / "report.html"
        source.write_text(page, encoding="utf-8")
        printed = Path(folder) / "report.pdf"
        # The page is our own and reaches nothing; as root Chromium does not start with its sandbox.
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command = [
            *(str(browser), *_FLAGS, *sandbox),
            f"--user-data-dir={folder}/profile",
            f"--virtual-time-budget={DRAWING_MS}",
            f"--print-to-pdf={printed}",
            source.as_uri(),
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise BrowserError(f"{browser} did not print the report within {TIMEOUT_S:.0f} s.") from None
        if not printed.is_file() or not printed.read_bytes().startswith(b"%PDF"):
            last = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise BrowserError(f"{browser} could not print the report: {last}")
        path.write_bytes(printed.read_bytes() + MARK)
