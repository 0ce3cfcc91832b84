"""The cost of a change: the same training and the same imports with two checkouts of sonde, taking turns.

    git worktree add ../before REVISION
    python benchmarks/checkouts.py ../before .            # writes benchmarks/results/checkouts.md

Every measurement is a separate process, with the `src` folder of one checkout first in its path; each round runs all
arms in random order, with bytecode as an installed package has it. Times are CPU time of the process, all threads; for
`init` and `watch`, of the thread that calls them. A ratio is an arm's time in a round divided by the time without sonde
in the same round; the table shows the median over rounds and its bootstrap interval.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from report import describe_machine, interval

RESULTS = Path(__file__).parent / "results"
TRAIN = """
import json, sys, time
import torch
from torch import nn
model_name, arm, folder, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
torch.manual_seed(0)
torch.set_num_threads(1)
if model_name == "mlp":
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    def loss_of(x): return nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))
    batch = torch.randn(64, 784)
else:
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4))
    def loss_of(x): return model(input_ids=x, labels=x).loss
    batch = torch.randint(0, 256, (8, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
session = None
if arm != "without":
    import sonde
    options = {"budget": None} if arm == "everything" else {}
    sonde.init(project="checkouts", dir=folder, verbose=False)
    session = sonde.watch(model, optimizer, **options)
def train(num):
    for _ in range(num):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
train(10)
if session is not None:
    session.flush()
began = time.process_time()
train(steps)
if session is not None:
    session.flush()
print(json.dumps(time.process_time() - began))
if session is not None:
    session.finish()
"""
IMPORT = """
import json, sys, time
if sys.argv[1] == "session":
    import numpy, torch
began = time.process_time()
import sonde
if sys.argv[1] == "session":
    sonde.watch
    import sonde.session.session
print(json.dumps(time.process_time() - began))
"""
START = """
import json, tempfile, time
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with tempfile.TemporaryDirectory() as folder:
    began = time.thread_time()
    import sonde
    sonde.init(project="checkouts", dir=folder, verbose=False)
    session = sonde.watch(model, optimizer)
    took = time.thread_time() - began
    session.finish()
print(json.dumps(took))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    machine = describe_machine(threads=1)["machine"]
    for path in checkouts.values():
        compileall.compile_dir(path / "src", quiet=1)
    lines = ["# The cost of a change", "", f"{machine['processor']}, {machine['cores']} cores, one thread for torch."]
    lines += [
        f"{options.rounds} rounds of {options.steps} steps, 10 to warm up; CPU time until everything is on disk.",
        "",
    ]
    lines += [f"- {name}: {revision(path)}" for name, path in checkouts.items()]
    lines += ["", "| | before | after | after / before |", "|---|---|---|---|"]
    for model in ("mlp", "gpt2"):
        for arm in ("default", "everything"):
            lines.append(training_line(model, arm, checkouts, options.rounds, options.steps))
            print(lines[-1], flush=True)
    for what in ("sonde", "session", "start"):
        lines.append(import_line(what, checkouts, options.rounds * 2))
        print(lines[-1], flush=True)
    (RESULTS / "checkouts.md").write_text("\n".join(lines) + "\n")


def training_line(model: str, arm: str, checkouts: dict[str, Path], rounds: int, steps: int) -> str:
    def run(name: str) -> float:
        folder = tempfile.mkdtemp()
        try:
            kind = "without" if name == "without" else arm
            return measured(TRAIN, [model, kind, folder, str(steps)], checkouts.get(name, checkouts["after"]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    times = in_turns(["without", *checkouts], rounds, run)
    ratios = {name: [t / base for t, base in zip(times[name], times["without"], strict=True)] for name in checkouts}
    change = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    label = "default settings" if arm == "default" else "everything at every step (budget=None)"
    cells = [f"{model}, {label}, × without sonde", *(shown(ratios[name]) for name in checkouts), shown(change)]
    return f"| {' | '.join(cells)} |"


def import_line(what: str, checkouts: dict[str, Path], rounds: int) -> str:
    program = START if what == "start" else IMPORT
    times = in_turns(list(checkouts), rounds, lambda name: measured(program, [what], checkouts[name]))
    change = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    label = {
        "sonde": "`import sonde`",
        "session": "`import sonde` and its session, after torch",
        "start": "`import sonde`, `init` and `watch`, after torch",
    }[what]
    values = (f"{1000 * sorted(times[name])[rounds // 2]:.0f} ms" for name in checkouts)
    return f"| {label} | {' | '.join(values)} | {shown(change)} |"


def in_turns(arms: list[str], rounds: int, run: Callable[[str], float]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in random.sample(arms, len(arms)):
            times[arm].append(run(arm))
    return times


def measured(program: str, arguments: list[str], checkout: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def revision(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h (%cs)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def shown(values: list[float]) -> str:
    middle, (low, high) = interval(values)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


if __name__ == "__main__":
    main()
