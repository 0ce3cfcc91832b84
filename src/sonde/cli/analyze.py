"""`sonde analyze FOLDER`: convergence, gradient flow, weight evolution, overfitting of a fine-tuning run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sonde.cli.options import Dir, Json, runs_dir
from sonde.cli.output import print_json, remark
from sonde.show.term.text import plain


def analyze(
    where: Annotated[
        str, typer.Argument(metavar="FOLDER|RUN", help="The output_dir of `sonde train`, a run, or checkpoints.")
    ] = "latest",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the report: .html, .json or .txt.")
    ] = None,
    gradients: Annotated[
        Path | None, typer.Option("--gradients", help="Also write gradients: whole to .npz, statistics to .parquet.")
    ] = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Analyze checkpoints and the run that made them: four questions, answered in words and numbers.

    \b
    Examples:
      sonde analyze checkpoints
      sonde analyze latest --output report.html
      sonde analyze checkpoints --gradients gradients.parquet --json
    """
    from sonde.run import find_run
    from sonde.tune.analyzer import CheckpointAnalyzer

    path = Path(where)
    analyzer = CheckpointAnalyzer(path if path.is_dir() else find_run(where, runs_dir(dir)))
    report = analyzer.generate_standard_report(save_to=output)
    if json:
        print_json(report.as_dict())
    else:
        sys.stdout.write("\n".join(plain(line) for line in report.text.split("\n")))
    if output is not None:
        remark(f"report written to {output}")
    if gradients is not None:
        found = analyzer.export_raw_gradients(gradients)
        what = "whole gradients" if found.is_whole else "statistics of gradients"
        remark(f"{what} of {len(found)} parameters written to {gradients}")
