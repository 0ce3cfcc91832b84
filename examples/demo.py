"""`make demo`: train a small GPT with one planted problem, watched by sonde, and let sonde say what is wrong.

The problem: one activation divides by a temperature that a schedule sets, and from step 150 on that is zero. One step
later every weight of the model is NaN, and nothing shows where it began. Nothing tells sonde about it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import sonde
from small_gpt import SmallGPT, load_text, next_batch
from sonde.cli.main import main as sonde_command

BLOCK = 2
CONTEXT, BATCH = 64, 16


class TemperedGELU(nn.Module):
    """An activation whose steepness a schedule sets."""

    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x / self.temperature)


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
        print(f"\n\x1b[1m{text}\x1b[0m" if self.has_colour else f"\n{text}", flush=True)


def train(num_steps: int, fault_step: int, dir: Path, terminal: Terminal) -> Path:
    """A training loop as anybody writes it; sonde is the three lines that say so."""
    torch.manual_seed(0)
    text, generator = load_text(), torch.Generator().manual_seed(0)
    model = SmallGPT(num_layers=4, dim=128, num_heads=4, context=CONTEXT)
    activation = model.blocks[BLOCK].mlp[1] = TemperedGELU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    session = sonde.init(project="demo", name="small-gpt", dir=dir, config={"lr": 1e-3, "batch": BATCH})
    session.watch(model, optimizer)
    for step in range(num_steps):
        if step == fault_step:
            activation.temperature = 0.0
        loss = model(*next_batch(text, batch=BATCH, context=CONTEXT, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.log({"loss": loss})
        terminal.progress(step, loss.item())
    session.finish()
    return Path(session.path)


def command(terminal: Terminal, *words: str) -> None:
    """Run a command of sonde and show it as it would be typed."""
    terminal.heading(f"$ sonde {' '.join(words)}")
    try:
        sonde_command(words)
    except SystemExit as end:
        if end.code not in (0, 1):  # 1: something critical was found, as it should be
            raise


def tell(run: sonde.Run, fault_step: int) -> None:
    """What was planted, and how little can be seen of it without looking inside."""
    table = run.stats("grad/*/nonfinite_fraction", steps=fault_step)
    num_bad = sum(value > 0 for value in table["value"].to_pylist())
    print(f"From step {fault_step} on, blocks.{BLOCK}.mlp.1 divided by a temperature of zero.")
    print(
        f"In that very step {num_bad} of {table.num_rows} gradients were no longer finite, and in the next all weights."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--fault-step", type=int, default=150)
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("SONDE_DIR", "runs")))
    options = parser.parse_args()
    if not 25 <= options.fault_step <= options.steps - 20:
        parser.error("--fault-step must be at least 25, and 20 less than --steps")
    torch.set_num_threads(1)  # a model this small gains little from a second one, and the writer has a core of its own

    terminal = Terminal(options.steps)
    print("Training a small GPT on the source of the standard library; one layer will be spoilt on the way.")
    folder = train(options.steps, options.fault_step, options.dir, terminal)

    command(terminal, "diagnose", str(folder))
    terminal.heading("What was planted")
    tell(sonde.open(folder), options.fault_step)

    terminal.heading("What to type next")
    name = ".venv/bin/sonde" if Path(".venv/bin/sonde").exists() and not shutil.which("sonde") else "sonde"
    print(f"  {name} diagnose latest --all")
    print(f"  {name} show latest --at {options.fault_step}")
    sql = "select site, nan, inf from stats where kind = 'act' and nan + inf > 0 and step = "
    print(f'  {name} query latest "{sql}{options.fault_step}"')
    print(f"  {name} list")
    print(f"  {name} ui {options.dir}   # the same in the browser")


if __name__ == "__main__":
    main()
