"""`sonde train config.yaml key=value …`: fine-tune a language model, record the run and save checkpoints."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sonde.cli.options import Json
from sonde.cli.output import print_json, remark
from sonde.show.term.number import counted, number
from sonde.show.term.text import plain
from sonde.tune.example import EXAMPLE


def train(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file; --example prints one.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Override a value of CONFIG, e.g. training.learning_rate=1e-3."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in output_dir.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the checkpoints in output_dir first.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the config, print it completed with defaults, and exit.")
    ] = False,
    example: Annotated[bool, typer.Option("--example", help="Print an example config and exit.")] = False,
    json: Json = False,
) -> None:
    """Fine-tune a language model and record the run.

    Saves checkpoints, from which --resume continues.

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
        raise UsageError("no config file given. Create one:  sonde train --example > tune.yaml")
    if resume and overwrite:
        raise UsageError("--resume needs the checkpoints that --overwrite deletes. Give only one of them.")
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
        remark(f"No checkpoint in {loaded.output_dir} to resume from; training starts from the beginning.")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result; trainers print progress to it
            result = train_from_config(loaded, resume=resume, overwrite=overwrite)
    except KeyboardInterrupt:
        _tell_how_to_resume(loaded.output_dir, config, overrides or [])
        raise
    answer = _answer(result)
    print_json(answer) if json else _show(answer)


def _tell_how_to_resume(folder: Path, config: Path, overrides: list[str]) -> None:
    from sonde.run import list_checkpoints

    steps = [checkpoint.step for checkpoint in list_checkpoints(folder) if not checkpoint.problem]
    if steps:
        again = shlex.join(["sonde", "train", str(config), *overrides, "--resume"])
        remark(f"The newest checkpoint is from step {steps[-1]}. To resume:  {again}")
    else:
        remark(f"No checkpoint was saved in {folder} yet, so there is nothing to resume from.")


def _answer(result: Any) -> dict[str, Any]:
    findings = [] if result.run is None else _findings(result.run)
    return {
        "run": None if result.run is None else str(result.run),
        "output_dir": str(result.output_dir),
        "merged": str(merged) if (merged := result.output_dir / "merged").is_dir() else None,
        "steps": result.num_steps,
        "train_loss": result.train_loss,
        "eval_loss": result.metrics.get("eval_loss"),
        "checkpoints": [checkpoint.step for checkpoint in result.checkpoints],
        "findings": [{"rule": f.rule, "severity": f.severity, "message": f.message} for f in findings],
    }


def _findings(run: Path) -> list[Any]:
    """The findings, without the remarks that `sonde diagnose --all` shows."""
    from sonde.run import open as open_run

    return [finding for finding in open_run(run).findings() if finding.severity != "info"]


def _show(answer: dict[str, Any]) -> None:
    folder = plain(shlex.quote(answer["output_dir"]))
    held_out = answer["eval_loss"]
    losses = f"training loss {number(answer['train_loss'])}" + (
        "" if held_out is None else f", validation loss {number(held_out)}"
    )
    print(f"{counted(answer['steps'], 'step')}, {losses}")
    print(f"trained model: {folder}/final    checkpoints: {', '.join(map(str, answer['checkpoints'])) or 'none'}")
    if answer["merged"] is not None:
        print(f"merged model: {plain(shlex.quote(answer['merged']))}")
    print(f"  sonde report {folder}")
    if answer["run"] is not None:
        print(f"  sonde diagnose {plain(shlex.quote(answer['run']))}")
