"""`sonde train config.yaml key=value …`: fine-tune a language model, recorded, with checkpoints."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sonde.cli.options import Json
from sonde.cli.output import print_json, remark
from sonde.show.term.number import number
from sonde.show.term.text import plain

EXAMPLE = """\
model:                      # a new, small model; or  name: a folder or a name on the Hugging Face Hub
  architecture: llama
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  initializer_range: 0.1    # about 1 / sqrt(hidden_size); the usual 0.02 is for wide models
data:                       # made-up texts; or  path: a .txt, .jsonl, .csv or .parquet file
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the checkpoints in output_dir first.")] = False,
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
    if resume and overwrite:
        raise UsageError("--resume goes on from the checkpoints that --overwrite deletes: give one of them.")
    from sonde.tune.config import load_config
    from sonde.tune.train.ahead import check_ahead

    loaded = load_config(config, overrides or ())
    check_ahead(loaded)
    if check:
        print_json(loaded.model_dump(mode="json"))
        return
    from sonde.run import list_checkpoints
    from sonde.tune.train.from_config import train_from_config

    if resume and not list_checkpoints(loaded.output_dir):
        remark(f"there is no checkpoint in {loaded.output_dir} to go on from: training begins anew.")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what trainers print is not the answer, and stdout is for that
            result = train_from_config(loaded, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt:
        _tell_how_to_go_on(loaded.output_dir, config, overrides or [])
        raise
    answer = _answer(result)
    print_json(answer) if json else _show(answer)


def _tell_how_to_go_on(folder: Path, config: Path, overrides: list[str]) -> None:
    from sonde.run import list_checkpoints

    steps = [checkpoint.step for checkpoint in list_checkpoints(folder) if not checkpoint.problem]
    if steps:
        again = shlex.join(["sonde", "train", str(config), *overrides, "--resume"])
        remark(f"the newest checkpoint is of step {steps[-1]}; go on from it:  {again}")
    else:
        remark(f"no checkpoint was due yet in {folder}: nothing to go on from.")


def _answer(result: Any) -> dict[str, Any]:
    findings = [] if result.run is None else _findings(result.run)
    return {
        "run": None if result.run is None else str(result.run),
        "output_dir": str(result.output_dir),
        "steps": result.num_steps,
        "train_loss": result.train_loss,
        "eval_loss": result.metrics.get("eval_loss"),
        "checkpoints": [checkpoint.step for checkpoint in result.checkpoints],
        "findings": [{"rule": f.rule, "severity": f.severity, "message": f.message} for f in findings],
    }


def _findings(run: Path) -> list[Any]:
    """Remarks are left for `sonde diagnose --all`."""
    from sonde.run import open as open_run

    return [finding for finding in open_run(run).findings() if finding.severity != "info"]


def _show(answer: dict[str, Any]) -> None:
    folder = plain(shlex.quote(answer["output_dir"]))
    held_out = answer["eval_loss"]
    losses = f"training loss {number(answer['train_loss'])}" + (
        "" if held_out is None else f", held-out loss {number(held_out)}"
    )
    print(f"{answer['steps']} steps, {losses}")
    print(f"trained: {folder}/final    checkpoints: {', '.join(map(str, answer['checkpoints'])) or 'none'}")
    print(f"  sonde analyze {folder}")
    if answer["run"] is not None:
        print(f"  sonde diagnose {plain(shlex.quote(answer['run']))}")
