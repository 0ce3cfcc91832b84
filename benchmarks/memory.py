"""Memory and open files over a long run, and of the dashboard under load:  python benchmarks/memory.py

training   a small MLP, watched with default settings and one scalar in every tenth step, for 200,000 steps; the same
           without sonde. Samples of resident and anonymous memory and of open descriptors, twenty over the run.
dashboard  the server of `sonde ui` on a folder of runs, one of them being written, with eight clients that request what
           its pages request, as fast as they are answered. Samples over --minutes.

Writes benchmarks/results/memory.md. Each part is a separate process. Training grows twice: when the writer's
libraries are imported, and when the first Parquet segment is sealed and condensed, for the code that this loads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from report import describe_machine
from ui import Server, sonde_ui

RESULTS = Path(__file__).parent / "results"
NUM_SAMPLES = 20
NUM_CLIENTS = 8
TRAIN = """
import json, os, sys
import psutil, torch
folder, steps, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters())
inputs, targets = torch.randn(4096, 64), torch.randint(0, 10, (4096,))
if folder:
    import sonde
    sonde.watch(model, optimizer, dir=folder, project="memory", verbose=False)
process = psutil.Process()
for step in range(steps + 1):
    chosen = torch.randint(0, 4096, (64,))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen])
    loss.backward()
    optimizer.step()
    if folder and step % 10 == 0:
        sonde.log({"loss": loss})
    if step % every == 0:
        memory = process.memory_full_info()
        print(json.dumps([step, memory.rss, memory.uss, process.num_fds()]), flush=True)
if folder:
    sonde.finish()
"""


def train(folder: Path | None, steps: int) -> list[list[int]]:
    """[step, resident bytes, unique bytes, descriptors] for each sample."""
    command = [sys.executable, "-c", TRAIN, str(folder or ""), str(steps), str(steps // NUM_SAMPLES)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("[")]


def serve(folder: Path, minutes: float, steps: int) -> tuple[list[list[float]], int]:
    """[seconds, resident bytes, unique bytes, descriptors] for each sample, and the number of answers."""
    command = [sys.executable, "-c", TRAIN, str(folder), str(steps), str(steps)]
    with sonde_ui(folder) as server:
        writer = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            server.wait(lambda server: bool(json.loads(server.get("/api/runs"))["runs"]))
            return _load(server, minutes)
        finally:
            writer.terminate()
            writer.wait()


def _load(server: Server, minutes: float) -> tuple[list[list[float]], int]:
    ended, answered = threading.Event(), [0] * NUM_CLIENTS
    clients = [
        threading.Thread(target=_request, args=(server, ended, answered, client)) for client in range(NUM_CLIENTS)
    ]
    process, samples = psutil.Process(server.process.pid), []
    for client in clients:
        client.start()
    began = time.monotonic()
    for sample in range(NUM_SAMPLES + 1):
        time.sleep(max(began + sample * 60 * minutes / NUM_SAMPLES - time.monotonic(), 0.0))
        memory = process.memory_full_info()
        samples.append([time.monotonic() - began, memory.rss, memory.uss, process.num_fds()])
    ended.set()
    for client in clients:
        client.join()
    return samples, sum(answered)


def _request(server: Server, ended: threading.Event, answered: list[int], client: int) -> None:
    turn = client
    while not ended.is_set():
        runs = json.loads(server.get("/api/runs"))["runs"]
        api = f"/api/runs/{runs[turn % len(runs)]['id']}"
        turn += 1
        first = 137 * turn % 5000  # a different part each time, as when a reader pans
        paths = [f"{api}/{what}" for what in ("sites", "scalars?i=0", "health", "findings", "system", "events")]
        paths += [api, f"{api}/heat?kind=grad&stat=rms&w=700&from={first}&to={first + 2000}"]
        for path in paths:
            try:
                server.get(path)
            except HTTPException as error:
                if not any(f": {status} " in str(error) for status in (404, 503)):  # not yet there, or busy
                    raise
            answered[client] += 1


def as_markdown(found: dict[str, Any]) -> str:
    machine = found["machine"]
    made = f"Made by `{found['command']}` on {machine['date']}, commit `{machine['commit']}`: "
    made += f"{machine['machine']['cores']} cores, torch {machine['versions']['torch']}. "
    made += "MiB resident (MiB unique to the process) and open descriptors."
    lines = [
        "# Memory over time",
        "",
        made,
        "",
        "## Training, 64-128-128-10 MLP with Adam",
        "",
        "| step | with sonde | descriptors | without | descriptors |",
        "|---|---|---|---|---|",
    ]
    for ours, bare in zip(found["with"], found["without"], strict=True):
        lines.append(f"| {ours[0]:,} | {_memory(ours)} | {ours[3]} | {_memory(bare)} | {bare[3]} |")
    lines += [
        "",
        f"## Dashboard, {NUM_CLIENTS} clients without pause, {found['answers']:,} answers",
        "",
        "| after | memory | descriptors |",
        "|---|---|---|",
    ]
    lines += [f"| {sample[0]:.0f} s | {_memory(sample)} | {sample[3]} |" for sample in found["dashboard"]]
    return "\n".join(lines) + "\n"


def _memory(sample: list[Any]) -> str:
    return f"{sample[1] / 2**20:.0f} ({sample[2] / 2**20:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the dashboard is under load")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": describe_machine(threads=1), "command": " ".join(["python", *sys.argv])}
    with tempfile.TemporaryDirectory() as at:
        found["without"] = train(None, options.steps)
        found["with"] = train(Path(at), options.steps)
        found["dashboard"], found["answers"] = serve(Path(at), options.minutes, 100 * options.steps)
    (RESULTS / "memory.md").write_text(as_markdown(found))
    print(as_markdown(found))


if __name__ == "__main__":
    main()
