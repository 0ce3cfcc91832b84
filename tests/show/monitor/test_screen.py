"""The monitor on a screen: Textual's own pilot, keys pressed and panels read; and a real terminal in tmux."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("textual", reason="the monitor needs Textual: pip install 'sonde-ml[monitor]'")
pytest.importorskip("textual_plotext", reason="the monitor needs textual-plotext: pip install 'sonde-ml[monitor]'")

from textual.widgets import Static

from sonde.show.monitor.app import KEYS, Monitor
from sonde.show.monitor.frame import Curve
from sonde.show.monitor.heat import HeatLook, heat_lines
from sonde.show.monitor.panels import Findings, Heat, Plot, Runs, value_ticks
from sonde.show.monitor.target import Target
from sonde.show.monitor.watching import WatchedRuns
from sonde.show.pooled import Pooled

Script = Callable[[Monitor, Any], Awaitable[None]]


def falling(step: int) -> float:
    return 3.0 / (1 + step)


def play(folder: Path, script: Script, size: tuple[int, int] = (80, 24)) -> None:
    """Start the monitor on a screen of this size and run a script of keys against it."""

    async def run() -> None:
        app = Monitor(WatchedRuns(Target(folder)), interval_s=0.05)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.latest is not None)
            await script(app, pilot)

    asyncio.run(run())


async def until(pilot: Any, claim: Callable[[], bool]) -> None:
    for _ in range(400):
        if claim():
            return
        await pilot.pause(0.02)
    pytest.fail("it never came true")


def text_of(app: Monitor, selector: str) -> str:
    return str(app.screen.query_one(selector, Static).render())


@pytest.fixture
def two(begin: Any) -> Path:
    begin("first").steps(5, falling).finish()
    path: Path = begin("second").steps(30, falling, val=lambda step: 1.0, nan_at=20).finish()
    return path.parents[1]


@pytest.mark.parametrize("size", [(80, 24), (160, 48), (40, 12)])
def test_everything_is_on_the_screen(two: Path, size: tuple[int, int]) -> None:
    async def script(app: Monitor, pilot: Any) -> None:
        await until(pilot, lambda: app.latest is not None and app.latest.is_judged)
        await pilot.pause()
        assert "gpt/second" in text_of(app, "#title")
        assert "step 29" in text_of(app, "#title")
        assert "×" in str(app.query_one(Heat).render())
        assert any("nan_inf" in str(option.prompt) for option in app.query_one(Findings).options)
        assert app.query_one(Runs).display == (size[0] > 110)

    play(two, script, size)


def test_keys(two: Path) -> None:
    async def script(app: Monitor, pilot: Any) -> None:
        await pilot.press("n")
        await until(pilot, lambda: "gpt/first" in text_of(app, "#title"))
        await pilot.press("r", "k", "enter")
        await until(pilot, lambda: "gpt/second" in text_of(app, "#title"))
        await pilot.press("s")
        await until(pilot, lambda: app.latest is not None and app.latest.stat == "grad/*/max_abs")
        await pilot.press("g")
        await until(pilot, lambda: app.latest is not None and app.latest.stat == "param/*/max_abs")
        await pilot.press("space")
        assert "paused" in text_of(app, "#title")
        await pilot.press("space", "l", "o", "t", "d")
        await pilot.pause()

    play(two, script)


def test_question_mark_lists_every_key(two: Path) -> None:
    async def script(app: Monitor, pilot: Any) -> None:
        await pilot.press("question_mark")
        await pilot.pause()
        shown = str(app.screen.query_one(Static).render())
        assert all(meaning in shown for _, meaning in KEYS)
        await pilot.press("escape")
        assert len(app.screen_stack) == 1

    play(two, script)


def test_every_binding_is_in_the_list_of_keys() -> None:
    told = " ".join(key for key, _ in KEYS).replace("?", "question_mark").lower().split()
    assert [binding.key for binding in Monitor.BINDINGS if binding.key not in told] == []


def test_enter_opens_a_finding_with_its_remedy(two: Path) -> None:
    async def script(app: Monitor, pilot: Any) -> None:
        await until(pilot, lambda: app.latest is not None and app.latest.is_judged)
        await pilot.pause()
        await pilot.press("enter")
        await pilot.pause()
        assert "fix  " in str(app.screen.query_one(Static).render())

    play(two, script)


def test_no_run_yet_is_waited_for(begin: Any, tmp_path: Path) -> None:
    async def script(app: Monitor, pilot: Any) -> None:
        assert "sonde run train.py" in text_of(app, "#problem")
        begin().steps(3, falling).flush()
        await until(pilot, lambda: "gpt/baseline" in text_of(app, "#title"))
        assert not app.query_one("#problem").display

    play(tmp_path / "runs", script)


def test_live_run_moves_on(begin: Any, tmp_path: Path) -> None:
    recording = begin().steps(3, falling).flush()

    async def script(app: Monitor, pilot: Any) -> None:
        await until(pilot, lambda: "step 2" in text_of(app, "#title"))
        recording.steps(4, falling).flush()
        await until(pilot, lambda: "step 6" in text_of(app, "#title"))

    play(tmp_path / "runs", script)


def test_hostile_names_are_text(begin: Any, tmp_path: Path) -> None:
    begin("[red]x[/red]\x1b[31m", layers=["a[bold].weight", "b[/].weight"]).steps(12, falling, nan_at=5).finish()

    async def script(app: Monitor, pilot: Any) -> None:
        await until(pilot, lambda: app.latest is not None and app.latest.is_judged)
        assert "[red]x[/red]" in text_of(app, "#title")
        assert "\x1b[31m" not in text_of(app, "#title")
        assert "a[bold].w" in str(app.query_one(Heat).render())

    play(tmp_path / "runs", script, (120, 30))


def drawn(values: list[float], *, is_log: bool | None) -> list[str]:
    """The lines of a plot, as they are on the screen."""

    async def run() -> str:
        from textual.app import App

        plot = Plot()
        plot.is_log = is_log

        class Alone(App[None]):
            def compose(self) -> Any:
                yield plot

        async with Alone().run_test(size=(60, 20)) as pilot:
            plot.draw("loss", [Curve("loss", np.arange(len(values)), np.array(values, float))])
            await pilot.pause()
            return plot.render().plain

    return asyncio.run(run()).splitlines()


NOTHING = ("loss: no data yet", "")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (NOTHING, NOTHING, NOTHING)),
        ([np.nan], (NOTHING, NOTHING, NOTHING)),
        ([0.0, 0.0], (("loss", "0"), ("loss", "0"), ("loss", "0"))),
        ([-1.0, 1e300], (("loss", "-1"), ("loss, log", "1e+300"), ("loss", "-1"))),
        ([1e-300, 1e300, np.inf], (("loss, log", "1e-300"), ("loss, log", "1e-300"), ("loss", "1e-300"))),
        ([5.0], (("loss", "5"), ("loss, log", "5"), ("loss", "5"))),
    ],
)
def test_plots_of_anything(values: list[float], expected: tuple[tuple[str, str], ...]) -> None:
    """The title, the lowest label of the axis, a curve where there are numbers, and a cross for each infinity."""
    for is_log, (title, lowest) in zip((None, True, False), expected, strict=True):
        heading, *lines = drawn(values, is_log=is_log)
        labels = [line.partition("┤")[0].strip() for line in lines if "┤" in line]
        assert (heading.strip(), labels[-1:]) == (title, [lowest] if lowest else [])
        assert bool(re.search("[\u2801-\u28ff]", "".join(lines))) == bool(lowest)
        assert sum(line.count("x") for line in lines) == np.isinf(values).sum()


def test_ticks_are_round_on_a_logarithmic_axis() -> None:
    assert value_ticks(-3.2, 0.1, is_log=True, num=4) == [(-3, "0.001"), (-2, "0.01"), (-1, "0.1"), (0, "1")]
    assert len(value_ticks(-300.0, 300.0, is_log=True, num=4)) <= 4
    assert value_ticks(2.0, 2.0, is_log=False, num=4) == [(2.0, "2")]


@pytest.mark.parametrize("has_colours", [True, False])
def test_heat_is_as_large_as_the_room_and_hides_no_nan(has_colours: bool) -> None:
    cells = np.random.default_rng(0).random((300, 500))
    cells[123, 321] = np.inf
    pooled = Pooled(tuple(f"grad/{n}" for n in range(150)), 0, 1.0, cells)
    lines = heat_lines(pooled, HeatLook(60, 12, has_colours=has_colours))
    assert len(lines) == 12
    assert max(line.cell_len for line in lines) <= 60
    assert sum(line.plain.count("×") for line in lines) == 1


# ------------------------------------------------------------------------------------------------------ a real terminal


class Terminal:
    """A terminal in tmux: type into it, read it."""

    def __init__(self, command: str, size: tuple[int, int], env: dict[str, str]) -> None:
        self.name = f"sonde-test-{os.getpid()}-{time.monotonic_ns()}"
        # tmux has its own mind about TERM, and the environment of its server may say how wide a terminal is.
        sets = " ".join(f"{name}={value}" for name, value in env.items())
        width, height = map(str, size)
        self._tmux("new-session", "-d", "-x", width, "-y", height, f"env -u COLUMNS -u LINES {sets} {command}")

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self.name, "-f", os.devnull, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def read(self, *, with_colours: bool = False) -> str:
        return self._tmux("capture-pane", "-p", *(["-e"] if with_colours else []))

    def wait_for(self, text: str) -> str:
        for _ in range(150):
            shown = self.read()
            if text in shown:
                return shown
            time.sleep(0.1)
        pytest.fail(f"{text!r} never came up in:\n{self.read()}")

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: a real terminal cannot be tried")
    opened: list[Terminal] = []

    def start(arguments: str, size: tuple[int, int] = (80, 24), **env: str) -> Terminal:
        command = f"{sys.executable} -m sonde.cli.main monitor {arguments}; echo ended with $?; cat"
        opened.append(Terminal(command, size, {"TERM": "xterm-256color", **env}))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.slow
def test_in_tmux_it_draws_takes_keys_and_leaves_a_clean_terminal(two: Path, terminal: Any) -> None:
    screen = terminal(str(two))
    shown = screen.wait_for("findings: ")
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "gpt/second  finished  step 29" in shown
    assert "×" in shown
    assert "grad/*/rms" in shown
    screen.press("?")
    assert "logarithmic axis" in screen.wait_for("Esc to close")
    screen.press("Escape")
    screen.wait_for("stand out in rms")  # a key that follows Escape at once would be Alt with that key
    screen.press("r")
    screen.wait_for("runs: 2")
    screen.press("q")
    assert "ended with 0" in screen.wait_for("ended with")


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "xterm"}], ids=["no colour", "16 colours"])
def test_in_tmux_without_colours_shades_stand_for_them(two: Path, terminal: Any, env: dict[str, str]) -> None:
    screen = terminal(str(two), (120, 40), **env)
    screen.wait_for("findings: ")
    shown = screen.wait_for("gpt/first")
    assert set("░▒▓█") & set(shown)
    assert "48;2;" not in screen.read(with_colours=True)


@pytest.mark.slow
def test_in_tmux_it_waits_for_a_run(begin: Any, tmp_path: Path, terminal: Any) -> None:
    screen = terminal(str(tmp_path / "runs"))
    screen.wait_for("sonde run train.py")
    begin().steps(3, falling).flush()
    screen.wait_for("gpt/baseline  running  step 2")


def test_a_frame_that_arrives_while_the_screen_closes_is_ignored(two: Path) -> None:
    async def script(app: Monitor, pilot: Any) -> None:
        await until(pilot, lambda: app.latest is not None)
        frame = app.latest
        await app.query("#title").remove()
        app.draw(frame)

    play(two, script)
