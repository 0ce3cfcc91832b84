"""The cost of the dashboard's server, and how fast it lists many series:  python benchmarks/ui.py

Three parts, each with real server processes queried over HTTP.

series    12,345 logged series, the same numbers written for TensorBoard and for sonde. For each server: wall-clock and
          CPU time from its start until the list of all series is complete, the same from its first response until then,
          and the response time once it is up. TensorBoard's list is /data/plugin/scalars/tags, ours is
          /api/runs/ID/sites. TensorBoard runs with its fast loader and without.
tiles     one run of many tensors and steps: CPU time of the server for the first picture of the whole run, for the
          exact one, and for pictures while panning and zooming; bytes on the wire.
overview  bytes transferred when you open a run, compressed.

Times of processes are wall-clock, and both servers of a comparison run on the same machine within the same minute; CPU
times are those of the server's process alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))
sys.path.insert(0, str(Path(__file__).parent))

from big_run import Plan, Planted, big_run
from report import describe_machine

RESULTS = Path(__file__).parent / "results"
NUM_SERIES = 12_345
LIMIT = 1 / 20


class Server:
    """A server process on a port of this machine."""

    def __init__(self, process: subprocess.Popen[str], port: int, headers: dict[str, str], began: float) -> None:
        self.process, self.port, self.headers, self.began = process, port, headers, began
        self._watched = psutil.Process(process.pid)

    def get(self, path: str) -> bytes:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("GET", path, headers=self.headers)
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise HTTPException(f"{path}: {response.status} {body[:200]!r}")
        self.num_wire_bytes = len(body)
        return gzip.decompress(body) if response.getheader("content-encoding") == "gzip" else body

    def cpu_s(self) -> float:
        """CPU time of the process and its children (TensorBoard has one that reads)."""
        spent = 0.0
        for process in (self._watched, *self._watched.children(recursive=True)):
            times = process.cpu_times()
            spent += times.user + times.system
        return spent

    def wait(self, is_there: Callable[[Server], bool], patience_s: float = 600.0) -> float:
        """Seconds from the start until a condition holds."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            try:
                if is_there(self):
                    return time.monotonic() - self.began
            except (OSError, HTTPException):
                pass
            if self.process.poll() is not None:
                raise SystemExit(f"the server exited: {self.process.args}")
            time.sleep(0.02)
        raise SystemExit(f"timed out after {patience_s:.0f} s: {self.process.args}")


@contextmanager
def sonde_ui(dir: Path) -> Iterator[Server]:
    began = time.monotonic()
    command = [sys.executable, "-m", "sonde.cli.main", "ui", str(dir), "--port", "0", "--json", "--new-token"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        token = said["url"].partition("#token=")[2]
        yield Server(process, said["port"], {"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip"}, began)
    finally:
        process.terminate()
        process.wait()


@contextmanager
def tensorboard(dir: Path, port: int, *, load_fast: str) -> Iterator[Server]:
    began = time.monotonic()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(dir), "--port", str(port)]
    command += ["--load_fast", load_fast, "--reload_interval", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    try:
        yield Server(process, port, {"Accept-Encoding": "gzip"}, began)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.terminate()
        process.terminate()
        process.wait()


def write_tensorboard(dir: Path, num_steps: int) -> None:
    """One event for each number, as `SummaryWriter.add_scalar` writes them."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(dir), max_queue_size=10_000, flush_secs=600)
    for step in range(num_steps):
        values = np.random.default_rng(step).normal(size=NUM_SERIES)
        for n, value in enumerate(values.tolist()):
            summary = Summary(value=[Summary.Value(tag=f"metric/{n:05d}", simple_value=value)])
            writer.add_event(Event(wall_time=1.7e9 + step, step=step, summary=summary))
    writer.close()


def list_of_tensorboard(server: Server) -> int:
    return sum(len(tags) for tags in json.loads(server.get("/data/plugin/scalars/tags")).values())


def series(num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        plan = Plan(num_tensors=0, num_steps=num_steps, kinds=(), num_extra_scalars=NUM_SERIES - 4)
        big_run(root / "sonde", plan)
        write_tensorboard(root / "tensorboard", num_steps)
        found = {"series": NUM_SERIES, "steps": num_steps, "sonde": _list_sonde(root / "sonde")}
        for number, load_fast in enumerate(("false", "auto")):
            with tensorboard(root / "tensorboard", 17_600 + number + os.getpid() % 1000, load_fast=load_fast) as server:
                name = "tensorboard" if load_fast == "auto" else "tensorboard --load_fast=false"
                found[name] = _list_tensorboard(server)
    return found


def _list_sonde(dir: Path) -> dict[str, float]:
    with sonde_ui(dir) as server:
        up = _at(server, lambda server: bool(server.get("/")))
        api = f"/api/runs/{json.loads(server.get('/api/runs'))['runs'][0]['id']}/sites"
        complete = _at(server, lambda server: len(json.loads(server.get(api))["scalars"]) == NUM_SERIES)
        return _costs(up, complete, _again(server, api))


def _list_tensorboard(server: Server) -> dict[str, float]:
    up = _at(server, lambda server: bool(server.get("/data/environment")))
    complete = _at(server, lambda server: list_of_tensorboard(server) == NUM_SERIES)
    return _costs(up, complete, _again(server, "/data/plugin/scalars/tags"))


def _at(server: Server, is_there: Callable[[Server], bool]) -> tuple[float, float]:
    return server.wait(is_there), server.cpu_s()


def _costs(up: tuple[float, float], complete: tuple[float, float], answer_s: float) -> dict[str, float]:
    return {
        "start_to_complete_s": complete[0],
        "start_to_complete_cpu_s": complete[1],
        "up_to_complete_s": complete[0] - up[0],
        "up_to_complete_cpu_s": complete[1] - up[1],
        "answer_s": answer_s,
    }


def _again(server: Server, path: str) -> float:
    took = []
    for _ in range(9):
        began = time.monotonic()
        server.get(path)
        took.append(time.monotonic() - began)
    return float(np.median(took))


def tiles(dir: Path, columns: int) -> dict[str, Any]:
    from sonde.show.web.wire import read_binary

    with sonde_ui(dir) as server:
        server.wait(lambda server: bool(server.get("/api/runs")))
        api = f"/api/runs/{json.loads(server.get('/api/runs'))['runs'][0]['id']}"
        last = json.loads(server.get(api))["last_step"]
        heat = f"{api}/heat?kind=grad&stat=rms&w={columns}"
        found: dict[str, Any] = {"first": _measured(server, heat)}
        began = time.monotonic()
        before = server.cpu_s()
        while not read_binary(server.get(heat))[0]["is_exact"]:
            time.sleep(0.7)  # as the page does
        found["exact"] = {"after_s": time.monotonic() - began, "cpu_s": server.cpu_s() - before}
        found["whole"] = _measured(server, heat, 5)
        header, buffers = read_binary(server.get(heat))
        found["cells"] = [header["num_rows"], header["num_columns"]]
        found["nan_cells"] = int((buffers["codes"] == 255).sum())
        spans = {"a tenth": last // 10, "a hundredth": last // 100, f"{columns} single steps": columns - 1}
        for name, span in spans.items():
            for which, first in (("first", last // 2), ("panned", last // 2 + span // 8)):
                part = f"{heat}&from={first}&to={min(first + span, last)}"
                found[f"{name}, {which}"] = _measured(server, part)
                server.wait(lambda server, part=part: read_binary(server.get(part))[0]["is_exact"])
            found[f"{name}, again"] = _measured(server, part, 5)
        site = header["num_rows"] // 2
        found["one line, all steps"] = _measured(server, f"{api}/lines?i={site}&stat=rms&points=1000")
        found["one cell"] = _measured(server, f"{api}/cell?i={site}&step={last // 2}")
        found["memory_mib"] = server._watched.memory_info().rss / 2**20
        found["overview_wire_kib"] = _overview(server, api)
        return found


def _measured(server: Server, path: str, times: int = 1) -> dict[str, float]:
    walls, before = [], server.cpu_s()
    for _ in range(times):
        began = time.monotonic()
        server.get(path)
        walls.append(time.monotonic() - began)
    cpu = (server.cpu_s() - before) / times
    return {
        "cpu_ms": round(1000 * cpu, 1),
        "wall_ms": round(1000 * float(np.median(walls)), 1),
        "wire_kib": server.num_wire_bytes >> 10,
    }


def _overview(server: Server, api: str) -> float:
    """KiB that the page of a run requests when it opens."""
    total = 0
    for path in ("", "/sites", "/scalars?i=0,1,2,3", "/health", "/findings", "/system", "/events"):
        server.get(api + path)
        total += server.num_wire_bytes
    return total >> 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--series-steps", type=int, default=50)
    parser.add_argument("--columns", type=int, default=1500)
    parser.add_argument("--only-series", action="store_true")
    parser.add_argument("--run", type=Path, help="a folder with a run made by tests/programs/big_run.py")
    given = parser.parse_args()
    found: dict[str, Any] = {"command": "ui.py", **describe_machine(threads=1), "series": series(given.series_steps)}
    print(json.dumps(found["series"], indent=2), flush=True)
    if given.only_series:
        sys.exit(_judge(found["series"]))
    if given.run is not None:
        found["tiles"] = tiles(given.run, given.columns)
    else:
        with tempfile.TemporaryDirectory() as folder:
            planted = (
                Planted(tensor=given.tensors // 3, step=given.steps // 2, num_nan=1),
                Planted(tensor=given.tensors // 2, step=given.steps * 2 // 3, factor=1e4),
            )
            big_run(Path(folder), Plan(num_tensors=given.tensors, num_steps=given.steps, planted=planted))
            found["tiles"] = tiles(Path(folder), given.columns)
    print(json.dumps(found["tiles"], indent=2))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ui-server.json").write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(_judge(found["series"]))


def _judge(found: dict[str, Any]) -> int:
    """Compare our times with TensorBoard's, with its fast loader. The limit applies to the response with the list."""
    ours, theirs = found["sonde"], found["tensorboard"]
    for name in ours:
        print(f"{name:26} {ours[name]:8.3f} of {theirs[name]:8.3f}   1/{theirs[name] / max(ours[name], 1e-9):.0f}")
    return int(ours["answer_s"] > LIMIT * theirs["answer_s"])


if __name__ == "__main__":
    main()
