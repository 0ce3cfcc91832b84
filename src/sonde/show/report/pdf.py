"""A report as PDF, printed by the Chromium or Chrome installed on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from sonde.errors import SondeError, UsageError

BROWSER_VARIABLE: Final = "SONDE_CHROMIUM"
# Binaries first: wrapper scripts of distributions may set options that make headless printing take minutes.
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
    "--window-size=720,1000",  # the width of the text on paper: charts are drawn once, at this width
)
DRAWING_MS: Final = 20_000
"""Virtual time for drawing, in milliseconds; the page's clock runs ahead while it is idle."""
TIMEOUT_S: Final = 240.0
MARK: Final = b"\n% sonde report\n"
"""A comment after the end of the file, by which sonde recognises its own reports."""


class BrowserError(SondeError):
    """There is no browser to print with, or it failed."""


def find_browser() -> Path | None:
    """Find a browser: SONDE_CHROMIUM, or Chromium or Chrome in the usual places."""
    asked = os.environ.get(BROWSER_VARIABLE)
    if asked:
        if not Path(asked).is_file():
            raise UsageError(
                f"{BROWSER_VARIABLE} is set to {asked}, which does not exist. Set it to a Chromium or Chrome, "
                "or unset it."
            )
        return Path(asked)
    known = [Path(place) for place in _PLACES if os.access(place, os.X_OK)]
    return next(iter(known), None) or next((Path(found) for name in _NAMES if (found := shutil.which(name))), None)


def require_browser() -> Path:
    """Find a browser, or raise an error that says what to do without one."""
    found = find_browser()
    if found is None:
        raise BrowserError(
            "writing a PDF needs Chromium or Chrome, and none was found. Install one, set "
            f"{BROWSER_VARIABLE}=/path/to/chrome, or set format= to html and print the report from any browser."
        )
    return found


def print_pdf(page: str, path: Path) -> None:
    """Print a self-contained page to a PDF file."""
    browser = require_browser()
    with tempfile.TemporaryDirectory(prefix="sonde-report-") as folder:
        source = Path(folder) / "report.html"
        source.write_text(page, encoding="utf-8")
        printed = Path(folder) / "report.pdf"
        # The page is our own and loads nothing; Chromium's sandbox does not work as root.
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
            raise BrowserError(
                f"{browser} did not print the report within {TIMEOUT_S:.0f} s. Set format= to html instead."
            ) from None
        if not printed.is_file() or not printed.read_bytes().startswith(b"%PDF"):
            last = (result.stderr.strip().splitlines() or ["no error message"])[-1]
            raise BrowserError(f"{browser} failed to print the report: {last}")
        path.write_bytes(printed.read_bytes() + MARK)
