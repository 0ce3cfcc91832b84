"""`sonde plot RUN PATTERN`: a figure for a paper, as PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from sonde.cli.export_place import refuse_place
from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json
from sonde.errors import UnknownNameError, UsageError
from sonde.show.term.number import size as in_words
from sonde.show.term.text import plain

ENDINGS: Final = ("png", "svg", "pdf")


def plot(
    run: RunName,
    pattern: Annotated[list[str], typer.Argument(metavar="PATTERN", help="As grad/*/rms, loss or val/*.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file: .png, .svg or .pdf. Default: RUN-PATTERN.png.")
    ] = None,
    style: Annotated[str, typer.Option("--style", help="lines, heatmap, or auto: lines while there are few.")] = "auto",
    log: Annotated[
        bool | None, typer.Option("--log/--linear", help="The axis of values. Default: log where they span decades.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only steps A to B-1, as 100:200.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Above the figure; default: the run's name.")] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="WxH", help="In inches, as 6.4x3.2.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: Json = False,
    dir: Dir = None,
) -> None:
    """Plot series of a run with matplotlib. Many sites become a heatmap; what is not finite is marked.

    \b
    Examples:
      sonde plot latest loss -o loss.svg
      sonde plot latest "grad/*/rms" -o gradients.png
      sonde plot latest loss val/loss --log --steps 100:
    """
    from sonde.cli.export import _parse_steps
    from sonde.show.export.atomic import replacing
    from sonde.show.plot.figure import plot as draw

    found = open_run(run, dir)
    path = output or Path(f"{found.path.name}-{_slug(pattern[0])}.png")
    _refuse(path, force)
    inches = _parse_size(size)
    figure = draw(found, pattern, steps=_parse_steps(steps), style=cast(Any, style), log=log, title=title, size=inches)
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
        raise UnknownNameError("ending of a figure", path.suffix[1:], ENDINGS)
    refuse_place([path], force=force)


def _parse_size(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    try:
        width, height = (float(part) for part in parts)
    except ValueError:
        width = height = 0.0
    if not (0 < width <= 100 and 0 < height <= 100):
        raise UsageError(f'--size is "WxH" in inches, as in 6.4x3.2; got "{text}".')
    return width, height
