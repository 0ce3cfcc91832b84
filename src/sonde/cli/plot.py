"""`sonde plot RUN PATTERN`: a figure for a paper, as PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json
from sonde.errors import UnknownNameError
from sonde.show.export.place import refuse_place
from sonde.show.term.number import size as in_words
from sonde.show.term.text import plain

ENDINGS: Final = ("png", "svg", "pdf")


def plot(
    run: RunName,
    pattern: Annotated[
        list[str],
        typer.Argument(metavar="PATTERN", help="Series, scalars or tensors, e.g. grad/*/rms, loss, param/0.weight."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write: .png, .svg or .pdf. Default: RUN-PATTERN.png.")
    ] = None,
    style: Annotated[
        str,
        typer.Option(
            "--style",
            help="lines, heatmap, auto (lines for a few series, otherwise a heatmap), evolution or spectra.",
        ),
    ] = "auto",
    log: Annotated[
        bool | None,
        typer.Option("--log/--linear", help="Scale of the value axis. Default: log when values span decades."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only steps A to B-1, e.g. 100:200.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Title of the figure. Default: the run's name.")] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="WxH", help="Size in inches, e.g. 6.4x3.2.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: Json = False,
    dir: Dir = None,
) -> None:
    """Plot series of a run with matplotlib. Many sites become a heatmap; non-finite values are marked.

    Two styles show whole tensors over the snapshots of a run: evolution draws the norm, the distance from the first
    snapshot, the cosine to it and quantiles of the values; spectra draws the singular values at each snapshot.

    \b
    Examples:
      sonde plot latest loss -o loss.svg
      sonde plot latest "grad/*/rms" -o gradients.png
      sonde plot latest loss val/loss --log --steps 100:
      sonde plot latest param/0.weight --style evolution
      sonde plot latest param/0.weight --style spectra --steps 0:1000:100
    """
    from sonde.show.export.atomic import replacing
    from sonde.show.plot.figure import plot as draw

    found = open_run(run, dir)
    path = output or Path(f"{found.path.name}-{_slug(pattern[0])}.png")
    _refuse(path, force)
    figure = draw(found, pattern, steps=steps, style=cast(Any, style), log=log, title=title, size=size)
    with replacing(path) as draft:
        figure.savefig(draft, format=path.suffix[1:].lower())
    num_bytes = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "num_bytes": num_bytes})
    else:
        print(f"{plain(path)}  {in_words(num_bytes)}")


def _slug(pattern: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "._" else "-" for sign in pattern).strip("-") or "plot"


def _refuse(path: Path, force: bool) -> None:
    if path.suffix[1:].lower() not in ENDINGS:
        raise UnknownNameError("figure format", path.suffix[1:], ENDINGS)
    refuse_place([path], force=force)
