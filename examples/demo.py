"""`make demo`: train a small GPT with one planted fault while sonde watches, and let sonde diagnose it.

The fault: one activation divides by a temperature that a schedule sets, and from step 150 on the temperature is zero.
One step later every weight of the model is NaN, and nothing shows where it started. sonde gets no hint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import sonde
from small_gpt import SmallGPT, load_text, next_batch

BLOCK = 2
CONTEXT, BATCH = 64, 16


class TemperedGELU(nn.Module):
    """An activation whose steepness a schedule sets."""

    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x / self.temperature)


class Terminal:
    """A progress line that overwrites itself on a terminal; elsewhere, a line for every tenth of the steps."""

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
    """An ordinary training loop, plus the lines that mention `session`."""
    torch.manual_seed(0)
    text, generator = load_text(), torch.Generator().manual_seed(0)
    model = SmallGPT(num_layers=4, dim=128, num_heads=4, context=CONTEXT)
    activation = model.blocks[BLOCK].mlp[1] = TemperedGELU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    config = {"lr": 1e-3, "batch": BATCH}
    session = sonde.watch(model, optimizer, project="demo", name="small-gpt", dir=dir, config=config)
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
    """Run a sonde command and show it as you would type it."""
    terminal.heading(f"$ sonde {' '.join(words)}")
    sys.stdout.flush()
    ended = subprocess.run([sys.executable, "-m", "sonde.cli.main", *words], check=False)
    if ended.returncode not in (0, 1):  # 1: something critical was found, as it should be
        raise SystemExit(ended.returncode)


def explain(run: sonde.Run, fault_step: int) -> None:
    """Print which fault was planted, and how far it had spread."""
    table = run.stats("grad/*/nonfinite_fraction", steps=fault_step)
    num_bad = sum(value > 0 for value in table["value"].to_pylist())
    print(f"From step {fault_step} on, blocks.{BLOCK}.mlp.1 divided by a temperature of zero.")
    if table.num_rows:  # sonde may not have recorded this step
        bad = f"{num_bad} of {table.num_rows} gradients"
        print(f"At that step {bad} were non-finite; one step later, so were all weights.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--fault-step", type=int, default=150)
    parser.add_argument("--dir", type=Path, default=Path(os.environ.get("SONDE_DIR", "runs")))
    options = parser.parse_args()
    if not 25 <= options.fault_step <= options.steps - 20:
        parser.error("--fault-step must be at least 25, and 20 less than --steps")
    torch.set_num_threads(1)  # a model this small gains little from a second one, and the writer gets its own core

    terminal = Terminal(options.steps)
    print("Training a small GPT on the source code of the standard library; one layer will break on the way.")
    folder = train(options.steps, options.fault_step, options.dir, terminal)

    command(terminal, "diagnose", str(folder))
    terminal.heading("What was planted")
    explain(sonde.open(folder), options.fault_step)

    terminal.heading("What to type next")
    name = ".venv/bin/sonde" if Path(".venv/bin/sonde").exists() and not shutil.which("sonde") else "sonde"
    print(f"  {name} diagnose latest --all")
    print(f"  {name} show latest --at {options.fault_step}")
    sql = "select site, nan, inf from stats where kind = 'act' and nan + inf > 0 and step = "
    print(f'  {name} query latest "{sql}{options.fault_step}"')
    print(f"  {name} list")
    if sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(KeyboardInterrupt):  # the dashboard serves until Ctrl-C
            command(terminal, "ui", str(options.dir))
    else:
        print(f"  {name} ui {options.dir}   # the same in the browser")


if __name__ == "__main__":
    main()
