"""Snapshots of a model with 50 million parameters and its optimizer's state every 10 steps, 20 of them.

    python benchmarks/snapshots_at_size.py    # needs 15 GB of disk

Two processes take turns training the same model for 10 steps each, one with snapshots and one without, so that whatever
else the machine does affects both. The ratio of their times is the cost to training. Then every snapshot is read back
and checked, and one layer is read over all steps. Nothing is left on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import describe_machine, folder_bytes

RESULTS = Path(__file__).parent / "results"
NAME = "snapshots-at-size"
WIDTH, DEPTH, ROWS = 2048, 12, 16
EVERY, NUM = 10, 20


def train(folder: str, num: int) -> None:
    """Train ten steps for each line on stdin, and print how long they took. An empty folder: without sonde."""
    import torch

    import sonde

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(ROWS, WIDTH)
    if folder:
        off: Any = dict.fromkeys(("params", "grads", "updates", "optim", "activations", "inspect"), False)
        plan = sonde.Snapshots(when=EVERY, kinds=("param", "optim"), on_finding=None)
        sonde.init(dir=folder, live_rules=False, check_finite=False, snapshot_wait_s=600.0, finish_deadline_s=600.0)
        sonde.watch(model, optimizer, snapshots=plan, **off)
    print(json.dumps({"parameters": sum(parameter.numel() for parameter in model.parameters())}), flush=True)
    for _ in range(num):
        if not sys.stdin.readline():  # the parent has ended
            return
        began = time.perf_counter()
        for _ in range(EVERY):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps(time.perf_counter() - began), flush=True)
    began = time.perf_counter()
    if folder:
        sonde.finish()
    print(json.dumps(time.perf_counter() - began), flush=True)


class Arm:
    """A process that trains when it is told to."""

    def __init__(self, folder: str, num: int) -> None:
        command = [sys.executable, __file__, "--train", folder, "--num", str(num)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self.line()

    def line(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def turn(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self.line())

    def end(self) -> float:
        finish_s = float(self.line())
        self._process.wait()
        return finish_s


def measure(folder: Path, num: int) -> dict[str, Any]:
    import numpy as np

    import sonde

    arms = {"with": Arm(str(folder), num), "without": Arm("", num)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(num):
        for name in sorted(arms, reverse=bool(turn % 2)):
            seconds[name].append(arms[name].turn())
        print(f"turn {turn + 1} of {num}: {seconds['with'][-1]:.1f} s, {seconds['without'][-1]:.1f} s", flush=True)
    finish_s = arms["with"].end()
    arms["without"].end()
    run = sonde.open("latest", dir=folder)
    table = run.tensors.snapshots()
    sizes = {name: sum(table[name].to_pylist()) for name in ("bytes", "stored_bytes")}
    began = time.perf_counter()
    layer = run.tensors.get("param/0.weight")
    opened_s = time.perf_counter() - began
    rows = layer[:, :4].values
    rows_s = time.perf_counter() - began - opened_s
    bad = run.verify()
    return {
        "parameters": arms["with"].facts["parameters"],
        "steps": num * EVERY,
        "ratio": sum(seconds["with"]) / sum(seconds["without"]),
        "ratio_median": float(np.median(np.divide(seconds["with"], seconds["without"]))),
        "seconds": seconds,
        "finish_s": finish_s,
        "wanted": num,
        "kept": table.num_rows,
        "warnings": [str(warning) for warning in run.warnings],
        "raw_bytes": sizes["bytes"],
        "stored_bytes": sizes["stored_bytes"],
        "disk_bytes": folder_bytes(run.path / "tensors"),
        "lazy": {"shape": list(layer.shape), "open_s": opened_s, "four_rows_of_all_steps_s": rows_s,
                 "distinct_steps": len(np.unique(rows.reshape(num, -1), axis=0))},
        "damage": [str(one) for one in bad],
    }  # fmt: skip


def report(found: dict[str, Any]) -> str:
    lazy, gib, millions = found["lazy"], 1 << 30, found["parameters"] / 1e6
    return f"""# Snapshots at size

{millions:.1f} million parameters with AdamW's state, a snapshot every {EVERY} steps, {found["steps"]} steps.
Made by `python benchmarks/snapshots_at_size.py` on {found["date"]}, commit `{found["commit"]}`:
{found["machine"]["processor"]}, {found["machine"]["cores"]} cores, 1 torch thread;
torch {found["versions"]["torch"]}. Processes that wanted to run when it started: {found["load"]:.1f}.

| | |
|---|---|
| time of training with snapshots, relative to without | {found["ratio"]:.2f} |
| the same, median of the turns | {found["ratio_median"]:.2f} |
| time that `finish` then waited for the disk | {found["finish_s"]:.0f} s |
| snapshots kept of those planned | {found["kept"]} of {found["wanted"]} |
| size in memory | {found["raw_bytes"] / gib:.2f} GiB |
| size on disk, relative to memory | {found["disk_bytes"] / found["raw_bytes"]:.3f} |
| opening one layer over {found["kept"]} steps, without reading it | {lazy["open_s"]:.2f} s |
| reading four of its rows at all steps | {lazy["four_rows_of_all_steps_s"]:.2f} s |
| damaged | {len(found["damage"])} |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=NUM, help="number of snapshots")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(given.train, given.num)
        return
    with tempfile.TemporaryDirectory(prefix="sonde-size-") as folder:
        found = {**describe_machine(threads=1), "load": os.getloadavg()[0], **measure(Path(folder), given.num)}
    print(report(found))
    if given.num >= NUM:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{NAME}.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / f"{NAME}.md").write_text(report(found))


if __name__ == "__main__":
    main()
