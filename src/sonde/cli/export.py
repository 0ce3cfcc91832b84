"""`sonde export RUN`: write a run's tables and whole tensors as files for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark
from sonde.show.term.number import counted, size
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.show.export.run import Shape


def export(
    run: RunName,
    what: Annotated[
        str,
        typer.Option(
            "--what",
            "-w",
            help="What to export. Tables: stats, scalars, events, system, sites or all. "
            "Whole tensors: weights, gradients, activations, optimizer or tensors.",
        ),
    ] = "all",
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="h5, parquet or arrow; for tables also csv, json; for tensors also safetensors, npz. "
            "Default: from the extension of -o, otherwise parquet (tables) or safetensors (tensors).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; a folder if there will be several files."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="A:B", help="Only steps A to B-1, e.g. 100:200; or one step, e.g. 100."),
    ] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(
            "--series",
            metavar="GLOB",
            help="Only matching stats, e.g. grad/*/norm, scalars, e.g. val/*, or tensors, e.g. grad/layers.3.*; "
            "repeat for several.",
        ),
    ] = None,
    internal: Annotated[
        bool, typer.Option("--internal", help="With --what scalars: also those that sonde recorded for its rules.")
    ] = False,
    shape: Annotated[
        str,
        typer.Option(
            "--shape",
            help="With --what scalars: long (one row per value) or wide (one row per step, one column per scalar).",
        ),
    ] = "long",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Export a run's tables or whole tensors for other programs. Files are written atomically.

    --what scalars exports what you logged, and the loss that sonde recorded if you logged none; --what all exports
    everything. An interrupted long export resumes when you run the same command again. Open exported tensors with
    `sonde.run.open_export`, which keeps every name and dtype.

    \b
    Examples:
      sonde export latest --what scalars -o loss.csv
      sonde export latest --what scalars --shape wide --format csv
      sonde export latest --what stats --series "grad/*/norm" --steps 1000:2000
      sonde export latest -o run.h5
      sonde export latest --what gradients --steps 100:200 --format h5
      sonde export latest --what weights --steps=-1: -o model.safetensors
    """
    from sonde.show.export.run import check_export, export_run

    check_export(what, format, output, shape=shape, internal=internal)
    written = export_run(
        open_run(run, dir),
        what,
        format=format,
        output=output,
        steps=steps,
        series=series,
        internal=internal,
        shape=cast("Shape", shape),
        force=force,
        quiet=json,
        on_resume=_say_resumed,
    )
    files = [{"path": str(path), "bytes": path.stat().st_size} for path in written]
    print_json(files) if json else _report(files)


def _say_resumed(num_parts: int) -> None:
    if num_parts:
        remark(
            f"Resuming: {counted(num_parts, 'part')} of this export {'is' if num_parts == 1 else 'are'} already done."
        )


def _report(files: list[dict[str, Any]]) -> None:
    for file in files:
        print(f"{plain(file['path'])}  {size(file['bytes'])}")
