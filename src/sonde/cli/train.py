"""`sonde train config.yaml key=value …`: fine-tune a language model, recorded, with checkpoints."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sonde.cli.options import Json
from sonde.cli.output import print_json

EXAMPLE = """\
model:                      # a new, small model; or  name: a folder or a name on the Hugging Face Hub
  architecture: llama
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
data:                       # made-up texts; or  path: texts.txt, path: rows.jsonl
  generate: counting
  num_samples: 500
method:
  name: lora                # full, lora, qlora, dora, ia3, prefix, prompt, bitfit, unsloth
  r: 8
  alpha: 16
training:
  num_epochs: 1
  learning_rate: 0.005
  batch_size: 8
  max_length: 64
checkpoints:
  interval: 20
  keep_last: 3
run:
  project: tune
  name: first
output_dir: checkpoints
"""


def train(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file; --example prints one.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Put over the file: training.learning_rate=1e-3.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in output_dir.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read the file, say what would be done, and stop.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a file to start from.")] = False,
    json: Json = False,
) -> None:
    """Fine-tune a language model, with everything recorded and checkpoints to go on from.

    \b
    Examples:
      sonde train --example > tune.yaml
      sonde train tune.yaml
      sonde train tune.yaml method.name=full training.learning_rate=1e-3
      sonde train tune.yaml --resume
    """
    from sonde.errors import UsageError

    if example:
        sys.stdout.write(EXAMPLE)
        return
    if config is None:
        raise UsageError("give a YAML file. `sonde train --example` prints one to start from.")
    from sonde.tune.config import load_config

    loaded = load_config(config, overrides or ())
    if check:
        print_json(loaded.model_dump(mode="json"))
        return
    from sonde.tune.from_config import train_from_config

    with contextlib.redirect_stdout(sys.stderr):  # trainers print what they log; stdout is for the answer
        result = train_from_config(loaded, resume=resume)
    answer: dict[str, Any] = {
        "run": None if result.run is None else str(result.run),
        "output_dir": str(result.output_dir),
        "steps": result.num_steps,
        "train_loss": result.train_loss,
        "eval_loss": result.metrics.get("eval_loss"),
        "checkpoints": [checkpoint.step for checkpoint in result.checkpoints],
    }
    print_json(answer) if json else _show(answer)


def _show(answer: dict[str, Any]) -> None:
    from sonde.show.term.number import number
    from sonde.show.term.text import plain

    held_out = answer["eval_loss"]
    losses = f"training loss {number(answer['train_loss'])}" + (
        "" if held_out is None else f", held-out loss {number(held_out)}"
    )
    print(f"{answer['steps']} steps, {losses}")
    print(f"checkpoints at {', '.join(map(str, answer['checkpoints'])) or 'none'} in {plain(answer['output_dir'])}")
    print(f"  sonde analyze {plain(answer['output_dir'])}")
    if answer["run"] is not None:
        print(f"  sonde diagnose {plain(answer['run'])}")
