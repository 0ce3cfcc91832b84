"""Follow README.md and docs/quickstart.md word for word, in an empty folder, with the Python that runs this script:

    fresh/bin/python scripts/first_steps.py

Installs what the pages install, runs their Python code and their commands, and opens the dashboard. The checkout
provides only the two pages: the sonde that runs is the installed one. Commands that begin with `make` need a checkout
and are left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
# A block that readers see, or one in a comment that prepares it.
BLOCK = re.compile(r"^(?:```|<!-- )(\w+)\n(.*?)^(?:```|-->)$", re.MULTILINE | re.DOTALL)
# The reader's own script in `sonde run train.py --lr 0.1`.
TRAIN = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=parser.parse_args().lr)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(64, 10)).square().mean().backward()
    optimizer.step()
"""


def main() -> None:
    pages = [page.read_text("utf-8") for page in PAGES]
    with tempfile.TemporaryDirectory(prefix="sonde-first-steps-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN, "utf-8")
        for page, text in zip(PAGES, pages, strict=True):
            follow(page.stem, text, folder)
        look_at_dashboard(folder)


def follow(name: str, page: str, folder: Path) -> None:
    """Install, run the Python code, then run the commands."""
    lines = [line.partition("  #")[0] for block in blocks(page, "console") for line in block.splitlines()]
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for command in commands:
        if command.startswith("pip install"):
            call(shlex.split(command), folder)
    check_origin(folder)
    (folder / f"{name}.py").write_text("\n".join(blocks(page, "python")), "utf-8")
    call(["python", f"{name}.py"], folder)
    for command in commands:
        if command.startswith("sonde ") and not command.startswith("sonde ui"):
            call(shlex.split(command), folder)


def blocks(page: str, language: str) -> list[str]:
    return [match[2] for match in BLOCK.finditer(page) if match[1] == language]


def check_origin(folder: Path) -> None:
    """Stop if sonde would come from anywhere but this environment."""
    code = "import sonde; print(sonde.__file__)"
    found = subprocess.run(
        ["python", "-c", code], cwd=folder, env=environment(), check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_relative_to(sys.prefix):
        raise SystemExit(f"sonde is not installed in this environment: it is imported from {found}")


def call(words: list[str], folder: Path) -> None:
    print("$", shlex.join(words), flush=True)
    subprocess.run(words, cwd=folder, env=environment(), check=True)


def environment() -> dict[str, str]:
    """The commands of this Python first, and no other setting of Python or sonde."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SONDE_", "PYTHON"))}
    return kept | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")]), "NO_COLOR": "1"}


def look_at_dashboard(folder: Path) -> None:
    """Start the dashboard, and fetch its page, every file that the page names, and the list of runs."""
    words = ["sonde", "ui", "--no-open", "--port", "0", "--json"]
    print("$", shlex.join(words), flush=True)
    with subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            origin, _, token = json.loads(server.stdout.readline())["url"].partition("/#token=")
            check_pages(lambda path: fetch(f"{origin}{path}", token))
        finally:
            server.terminate()


def check_pages(get: Callable[[str], bytes]) -> None:
    assets = re.findall(r'(?:src|href)="(/static/[^"]+)"', get("/").decode())
    sizes = {asset: len(get(asset)) for asset in assets}
    if not {".js", ".css"} <= {Path(asset).suffix for asset in assets} or not all(sizes.values()):
        raise SystemExit(f"the page lacks scripts or styles: {sizes}")
    runs = json.loads(get("/api/runs"))["runs"]
    if not runs:
        raise SystemExit("the dashboard shows no runs")
    print(f"dashboard: {len(assets)} files, {sum(sizes.values()):,} bytes, {len(runs)} runs", flush=True)


def fetch(url: str, token: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


if __name__ == "__main__":
    main()
