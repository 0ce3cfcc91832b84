"""`make demo`: train a small GPT with one planted problem, watched by sonde, and look at where the numbers show it.

The problem: from step 300 on, the learning rate of one layer is a hundred times what it should be, as after a slip in
the parameter groups of a schedule. Nothing tells sonde about it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

import sonde
from small_gpt import SmallGPT, load_text, next_batch
from sonde.cli.main import main as sonde_command

LAYER = "blocks.2.mlp.0"
FACTOR = 100
CONTEXT, BATCH = 64, 16


class Terminal:
    """A progress line that overwrites itself on a terminal, and a line now and then elsewhere."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps, self.began = num_steps, time.monotonic()
        self.is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.has_colour = self.is_live and not os.environ.get("NO_COLOR")

    def progress(self, step: int, loss: float) -> None:
        rate = (step + 1) / (time.monotonic() - self.began)
        text = f"step {step + 1:>4} of {self.num_steps}   loss {loss:6.3f}   {rate:4.1f} steps/s"
        if self.is_live:
            done = 30 * (step + 1) // self.num_steps
            print(f"\r\x1b[K{'━' * done}{'╌' * (30 - done)} {text}", end="", flush=True)
        elif (step + 1) % max(1, self.num_steps // 10) == 0:
            print(text, flush=True)

    def heading(self, text: str) -> None:
        print(f"\n\x1b[1m{text}\x1b[0m" if self.has_colour else f"\n{text}")


def parameter_groups(model: SmallGPT) -> list[dict[str, object]]:
    """The layer that will be spoilt, and everything else."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if not name.startswith(LAYER)]},
        {"params": [p for name, p in named if name.startswith(LAYER)]},
    ]


def train(num_steps: int, fault_step: int, dir: Path, terminal: Terminal) -> Path:
    """A training loop as anybody writes it; sonde is the three lines that say so."""
    torch.manual_seed(0)
    text, generator = load_text(), torch.Generator().manual_seed(0)
    model = SmallGPT(num_layers=4, dim=128, num_heads=4, context=CONTEXT)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3)

    session = sonde.init(project="demo", name="small-gpt", dir=dir, config={"lr": 1e-3, "batch": BATCH})
    session.watch(model, optimizer)
    for step in range(num_steps):
        if step == fault_step:
            optimizer.param_groups[1]["lr"] *= FACTOR
        loss = model(*next_batch(text, batch=BATCH, context=CONTEXT, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log({"loss": loss})
        terminal.progress(step, loss.item())
    session.finish()
    return Path(session.path)


def median(run: sonde.Run, pattern: str, steps: range) -> dict[str, float]:
    """The median of each series over some steps, by site."""
    table = run.stats(pattern, steps=steps)
    sites, values = table["site"].to_numpy(), table["value"].to_numpy()
    return {str(site): float(np.median(values[sites == site])) for site in np.unique(sites)}


def first_jump(run: sonde.Run, site: str, *, times: float = 5.0) -> int:
    """The first step at which a site's update is several times the median of all steps before it; -1 for never."""
    table = run.stats(f"update/{site}/ratio")
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    for i in range(20, len(values)):
        if values[i] > times * np.median(values[:i]):
            return int(steps[i])
    return -1


def tell(run: sonde.Run, fault_step: int, num_steps: int, terminal: Terminal) -> None:
    before, after = range(fault_step - 20, fault_step), range(fault_step, fault_step + 5)
    terminal.heading("What was planted, and where the numbers show it")
    print(f"From step {fault_step} on, the learning rate of {LAYER} was {FACTOR} times what it should be.\n")

    loss = run.scalars("loss")["value"].to_numpy()
    print(f"  loss                        {np.median(loss[before]):9.2f}  ->  {np.median(loss[fault_step:]):9.2f}")
    old, new = (median(run, "update/*.weight/ratio", steps) for steps in (before, after))
    order = sorted(old, key=lambda site: -new[site] / old[site])
    print("  update/*.weight/ratio, the three that changed most:")
    for site in order[:3]:
        print(f"    {site:<26}{old[site]:9.2e}  ->  {new[site]:9.2e}   x{new[site] / old[site]:,.1f}")
    old, new = (median(run, "act/*/zero_fraction", steps) for steps in (before, range(after.stop, num_steps)))
    site = max(new, key=lambda site: new[site] - old.get(site, 0.0))
    print("  act/*/zero_fraction, the one that changed most:")
    print(f"    {site:<26}{old[site]:9.1%}  ->  {new[site]:9.1%}   of its outputs exactly zero")
    print(f"\nThe first jump of update/{order[0]}/ratio is at step {first_jump(run, order[0])}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--fault-step", type=int, default=300)
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("SONDE_DIR", "runs")))
    options = parser.parse_args()
    if not 25 <= options.fault_step <= options.steps - 20:
        parser.error("--fault-step must be at least 25, and 20 less than --steps")
    torch.set_num_threads(1)  # a model this small gains little from a second one, and the writer has a core of its own

    terminal = Terminal(options.steps)
    print("Training a small GPT on the source of the standard library; one layer will be spoilt on the way.")
    folder = train(options.steps, options.fault_step, options.dir, terminal)

    terminal.heading(f"$ sonde show {folder}")
    try:
        sonde_command(["show", str(folder)])
    except SystemExit as end:
        if end.code:
            raise
    run = sonde.open(folder)
    tell(run, options.fault_step, options.steps, terminal)

    terminal.heading("What to type next")
    sql = f"select step, ratio from stats where kind = 'update' and site = '{LAYER}.weight' order by step"
    command = ".venv/bin/sonde" if Path(".venv/bin/sonde").exists() and not shutil.which("sonde") else "sonde"
    print(f"  {command} show latest --at {options.fault_step}")
    print(f'  {command} query latest "{sql}"')
    print(f"  {command} export latest --what scalars --format csv --output loss.csv")
    print(f"  {command} list")


if __name__ == "__main__":
    main()
