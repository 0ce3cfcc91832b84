"""Verbs of the tools that sonde replaces, and its own earlier ones. Hidden: each is another verb with some options."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from sonde.cli.diagnose import diagnose
from sonde.cli.doctor import doctor
from sonde.cli.options import Dir, Json, RunName
from sonde.cli.output import print_json, remark
from sonde.cli.report import find_checkpoints, write_gradients
from sonde.cli.show import show
from sonde.cli.snapshot import snapshot
from sonde.show.term.text import plain


def anomalies(
    run: RunName = "latest",
    type: Annotated[str | None, typer.Option("--type", "-t", help="Only this type; may be a glob.")] = None,
    severity: Annotated[str | None, typer.Option("--severity", "-s", help="Minimum severity.")] = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Same as `sonde diagnose --table --exit-zero`."""
    diagnose(run, table=True, exit_zero=True, type=type, severity=severity, dir=dir, json=json)


def analyze(
    where: Annotated[str, typer.Argument(metavar="FOLDER|RUN", help="A folder of checkpoints, or a run.")] = "latest",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write it: .html, .json or .txt.")] = None,
    gradients: Annotated[Path | None, typer.Option("--gradients", help="Also write the gradients.")] = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Same as `sonde report --format txt --output -`."""
    analyzer = find_checkpoints(where, dir)
    report = analyzer.generate_standard_report(save_to=output)
    if json:
        print_json(report.as_dict())
    else:
        sys.stdout.write("\n".join(map(plain, report.text.split("\n"))))
    if output is not None:
        remark(f"Wrote the report to {output}.")
    if gradients is not None:
        write_gradients(analyzer, gradients)


def info(
    dir: Dir = None,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting.")] = False,
    json: Json = False,
) -> None:
    """Same as `sonde doctor --no-checks`."""
    doctor(settings=settings, checks=False, dir=dir, json=json)


def weights(
    run: RunName,
    pattern: Annotated[str, typer.Argument(metavar="GLOB", help="Tensors to show.")] = "param/*",
    at: Annotated[int | None, typer.Option("--at", help="Step of the snapshot.")] = None,
    spectra: Annotated[bool, typer.Option("--spectra/--no-spectra", help="Also compute singular values.")] = True,
    top: Annotated[int | None, typer.Option("--top", min=1, help="Number of tensors to show.")] = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Same as `sonde show --tensors GLOB`."""
    show(run, tensors=pattern, at=at, spectra=spectra, top=top, dir=dir, json=json)


def push(
    run: RunName = "latest",
    patience_s: Annotated[float, typer.Option("--patience", metavar="SECONDS", help="Time without progress.")] = 60.0,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Same as `sonde snapshot --upload`."""
    snapshot(run, upload=True, patience_s=patience_s, dir=dir, json=json)


ALIASES: Final[dict[str, Callable[..., None]]] = {
    "anomalies": anomalies,
    "analyze": analyze,
    "info": info,
    "weights": weights,
    "push": push,
}
