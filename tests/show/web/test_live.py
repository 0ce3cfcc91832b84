"""While training writes: nudges, growing pictures, a death that is noticed; all with a real server where it matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.read.series import heatmap
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import SUMSQ, N, empty_rows
from sonde.show.web import live
from sonde.show.web.runs import run_key
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions

OPTIONS = WriterOptions(flush_interval_s=0.02, heartbeat_s=0.1, seal_steps=16, system_interval_s=60.0)

CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import numpy as np
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions
from sonde.schema.records import ScalarsRecord
run = create_run(Path(sys.argv[1]), project="live", name="victim")
writer = Writer(run, WriterOptions(flush_interval_s=0.02, heartbeat_s=0.1))
print(run, flush=True)
step = 0
while True:
    name = np.array([writer.scalar_id("loss")], np.int32)
    writer.put(ScalarsRecord(name, np.array([step]), np.array([time.time()]), np.array([1.0])), 8, step=step)
    writer.set_step(step)
    step += 1
    time.sleep(0.02)
"""


class Recording:
    """A run being written."""

    def __init__(self, dir: Path, name: str = "live") -> None:
        self.run = create_run(dir, project="live", name=name)
        self.writer = Writer(self.run, OPTIONS)
        self.step = 0

    def steps(self, number: int, scale: float = 1.0) -> Recording:
        sites = [self.writer.site_id(Site(kind="grad", name=f"{n}.weight", shape=(4,))) for n in range(3)]
        for _ in range(number):
            rows = empty_rows(3)
            rows[:, N], rows[:, SUMSQ] = 4, 4 * scale**2 * (1.0 + np.arange(3))
            record = StatsRecord.without_hist(self.step, time.time(), np.array(sites, np.int32), rows)
            assert self.writer.put(record, rows.nbytes, step=self.step)
            loss = np.array([self.writer.scalar_id("loss")], np.int32)
            self.writer.put(
                ScalarsRecord(loss, np.array([self.step]), np.array([time.time()]), np.ones(1)), 8, step=self.step
            )
            self.writer.set_step(self.step)
            self.step += 1
        assert self.writer.flush(10.0)
        return self


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    made = Recording(tmp_path / "runs")
    yield made
    made.writer.close("finished")


def test_answers_grow_with_the_run(recording: Recording, open_page: Any, tmp_path: Path) -> None:
    page = open_page(tmp_path / "runs")
    api = f"/api/runs/{run_key(recording.run.resolve())}"
    assert page.get(f"{api}/sites")["columns"]["i"] == []
    for _ in range(3):
        recording.steps(21)
        header, buffers = page.get(f"{api}/heat?kind=grad&stat=rms&w=500")
        assert header["num_columns"] == header["last_step"] + 1 == recording.step
        assert (buffers["codes"] > 0).all()  # sealed, not sealed yet, and what is between
        _, lines = page.get(f"{api}/lines?i=0&stat=rms")
        assert len(lines["steps"]) == recording.step
        assert page.get(api)["status"] == "running"


def test_a_spike_in_what_is_not_sealed_yet_is_seen(recording: Recording, open_page: Any, tmp_path: Path) -> None:
    page = open_page(tmp_path / "runs")
    recording.steps(40).steps(1, scale=1e6).steps(3)
    api = f"/api/runs/{run_key(recording.run.resolve())}"
    header, buffers = page.get(f"{api}/heat?kind=grad&stat=rms&w=4")
    codes = buffers["codes"].reshape(header["num_rows"], header["num_columns"])
    assert codes.max() == codes[2, 40 // header["steps_per_column"]]


def test_a_picture_that_grew_is_the_picture_of_somebody_who_comes_now(
    recording: Recording, open_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are read once; sealing in between, and joining what was seen, must not show."""
    monkeypatch.setattr(heatmap, "_MAX_PARTS", 3)
    page = open_page(tmp_path / "runs")
    page.answers.heats.ranges.max_bytes = 0  # colours are kept on purpose; here cells are compared
    path = f"/api/runs/{run_key(recording.run.resolve())}/heat?kind=grad&stat=rms&w=37"
    for number in (1, 7, 2, 9, 1, 14, 3, 3, 30, 1):
        recording.steps(number, scale=10.0 ** (number % 5))
        header, buffers = page.get(path)
        fresh_header, fresh = open_page(tmp_path / "runs").get(path)
        assert header["last_step"] == fresh_header["last_step"] == recording.step - 1
        assert np.array_equal(buffers["codes"], fresh["codes"])


def test_colours_follow_a_young_run_and_rest_later(recording: Recording, open_page: Any, tmp_path: Path) -> None:
    page = open_page(tmp_path / "runs")
    path = f"/api/runs/{run_key(recording.run.resolve())}/heat?kind=grad&stat=rms"
    recording.steps(1)
    first, _ = page.get(path)
    recording.steps(9, scale=1e6)
    then, _ = page.get(path)
    assert then["hi"] > first["hi"] + 4
    recording.steps(1, scale=1e9)
    last, buffers = page.get(path)
    assert last["hi"] == then["hi"]
    assert buffers["codes"].max() == 254


def test_listeners_that_do_not_keep_up_are_notified_once() -> None:
    import asyncio

    from sonde.show.web.runs import RunTable

    async def flood() -> list[dict[str, Any]]:
        news = live.News(RunTable([]))
        queue: asyncio.Queue[Any] = asyncio.Queue(4)
        news._queues.add(queue)
        for n in range(10):
            news.notify({"type": "run", "last_step": n})
        return [queue.get_nowait() for _ in range(queue.qsize())]

    heard = asyncio.run(flood())
    assert heard[0] == {"type": "runs"}
    assert heard[-1]["last_step"] == 9


# ---------------------------------------------------------------------------------------------- a real server


@dataclass
class Ui:
    """`sonde ui` as a process."""

    process: subprocess.Popen[str]
    port: int
    token: str
    connections: list[HTTPConnection] = field(default_factory=list)

    def ask(self, path: str, **headers: str) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        self.connections.append(connection)
        connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}", **headers})
        return connection.getresponse()

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path).read())

    def nudges(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


@pytest.fixture
def start_ui(tmp_path: Path) -> Iterator[Callable[..., Ui]]:
    started: list[Ui] = []

    def start(*arguments: str) -> Ui:
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        command = [sys.executable, "-m", "sonde.cli.main", "ui", "--json", "--port", "0", *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        started.append(Ui(process, 0, ""))
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        said = json.loads(line)
        started[-1].port, started[-1].token = said["port"], said["url"].partition("#token=")[2]
        return started[-1]

    yield start
    for ui in started:
        for connection in ui.connections:
            connection.close()
        ui.process.kill()
        ui.process.communicate()


@pytest.mark.slow
def test_step_end_and_death_are_sent_and_ctrl_c_ends_it_all(start_ui: Callable[..., Ui], tmp_path: Path) -> None:
    """One process for several behaviours: starting one takes a second."""
    (tmp_path / "runs").mkdir()
    child = tmp_path / "child.py"
    child.write_text(CHILD.format(here=str(tmp_path)))
    victim = subprocess.Popen([sys.executable, str(child), str(tmp_path / "runs")], stdout=subprocess.PIPE, text=True)
    try:
        assert victim.stdout is not None
        run = Path(victim.stdout.readline().strip())
        ui = start_ui("runs")
        line = ui.ask("/api/events", **{"Last-Event-ID": "999999"})
        assert line.status == 200
        assert line.getheader("content-type", "").startswith("text/event-stream")
        heard = ui.nudges(line)
        steps = [nudge["last_step"] for nudge in (next(heard), next(heard)) if nudge["type"] == "run"]
        assert len(steps) == 2
        assert steps[0] < steps[1]
        victim.kill()
        victim.wait()
        killed = time.monotonic()
        ended = next(nudge for nudge in heard if nudge.get("status") == "crashed")
        waited = time.monotonic() - killed
        assert ended["run"] == run_key(run.resolve())
        assert "killed" in ended["reason"]
        assert waited < 10.0  # the promise of the dashboard, not a measure of speed
        assert ui.json("/api/runs")["runs"][0]["status"] == "crashed"
        line.close()
        other = ui.ask("/api/events")
        ui.process.send_signal(signal.SIGINT)  # with a line still open
        out, err = ui.process.communicate(timeout=20)
        assert ui.process.returncode == 0
        assert (out, err) == ("", "")
        other.close()
    finally:
        victim.kill()
        victim.communicate()


def test_the_number_of_listeners_is_bounded(open_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_LISTENERS", 0)
    page = open_page(tmp_path)
    assert page.get("/api/events", 503)["error"]["code"] == "busy"
